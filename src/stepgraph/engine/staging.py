"""What the device knows of the rows, and what of it must be told before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepgraph.engine.ending import ending_inputs
from stepgraph.engine.lora import LoraSlots
from stepgraph.engine.lora.rows import adapter_inputs
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import mark_rows, sampling_inputs
from stepgraph.engine.scheduler import Chunk
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.device_rows import Numbers


class Staging:
    """Patches the device's state of rows that changed, and gathers the host's part where the batch changed.

    A request that moves to another row takes its state along on the device: its last token may be known only there.

    max_blocks: width of a block table. num_loras: active adapters of the batch that is staged.
    """

    def __init__(
        self, buffers: StaticBuffers, max_blocks: int, *, penalties: bool, lora: LoraSlots | None = None
    ) -> None:
        self._buffers, self._max_blocks = buffers, max_blocks
        self._penalties, self._lora = penalties, lora
        self._row_of: dict[Request, int] = {}
        self._rows_staged = 0  # of a step without prefill
        self._times_reset = buffers.times_reset
        self._in_doubt = False
        self.num_loras = 0

    @property
    def lost(self) -> bool:
        """Whether everything must be told anew, from what the host knows: every token must have been read before."""
        return self._in_doubt or self._times_reset != self._buffers.times_reset

    def doubt(self) -> None:
        """A step failed: what the device holds of the rows is anybody's guess."""
        self._in_doubt = True

    def stage(
        self, rows: list[Request], dirty: Sequence[int], grown: Sequence[tuple[int, int, int]], chunks: list[Chunk]
    ) -> dict[str, Any]:
        """Bring the device up to date; returns the host's part where the batch changed.

        dirty: rows that another one's occupant moved to. grown: (row, index, block) of block tables.
        chunks: prefill, on the rows behind.
        """
        anew = {row: (chunk.request, chunk.stop) for row, chunk in enumerate(chunks, start=len(rows))}
        if self.lost:
            anew |= {row: (request, request.num_tokens) for row, request in enumerate(rows)}
            self._rows_staged, self._times_reset = 0, self._buffers.times_reset
        elif dirty:
            self._buffers.move([self._row_of[rows[row]] for row in dirty], dirty)
        self._in_doubt = False
        if anew:
            self._patch(anew)
        if grown:
            self.grow(*zip(*grown, strict=True))
        if not anew and not dirty and len(rows) == self._rows_staged:
            return {}
        self._rows_staged = 0 if chunks else len(rows)
        requests = [*rows, *(chunk.request for chunk in chunks)]
        self._row_of = {request: row for row, request in enumerate(requests)}
        inputs = sampling_inputs(requests, penalties=self._penalties) | ending_inputs(requests)
        if self._lora is not None:
            adapters, self.num_loras = adapter_inputs(requests, self._lora)
            inputs |= adapters
        inputs["query_lens"] = np.array([1] * len(rows) + [c.stop - c.start for c in chunks], dtype=np.int32)
        prompts = [token for chunk in chunks for token in chunk.request.tokens(chunk.start, chunk.stop)]
        inputs["prompt_tokens"] = np.array([-1] * len(rows) + prompts, dtype=np.int64)
        return inputs

    def grow(self, rows: Numbers, indices: Numbers, blocks: Numbers) -> None:
        """Put blocks into block tables of rows."""
        self._buffers.put("block_tables", rows, indices, blocks)

    def _patch(self, anew: dict[int, tuple[Request, int]]) -> None:
        """Write rows' device state afresh. anew: by row the request, and how many of its tokens this step ends at."""
        requests = [request for request, _ in anew.values()]
        stops = [stop for _, stop in anew.values()]
        self._buffers.patch(
            list(anew),
            tokens=[request.tokens(stop - 1, stop)[0] for request, stop in anew.values()],
            positions=[stop - 1 for stop in stops],
            seq_lens=stops,
            block_tables=self._tables(requests),
        )
        if self._penalties:
            mark_rows(self._buffers.platform, self._buffers["seen"], requests, list(anew))

    def _tables(self, requests: list[Request]) -> np.ndarray[Any, Any]:
        """int32 [requests, max_blocks]: each request's blocks, then the null block."""
        tables = np.zeros((len(requests), self._max_blocks), dtype=np.int32)
        for row, request in enumerate(requests):
            tables[row, : len(request.blocks)] = request.blocks
        return tables
