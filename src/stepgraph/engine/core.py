"""The engine's step: decode all rows through the runner, then a chunk of prefill, eagerly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stepgraph.engine.kv_blocks import BlockPool, allocate_cache, blocks_for
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import mark_rows, sampling_inputs, sampling_slots
from stepgraph.engine.scheduler import Chunk, Scheduler
from stepgraph.ops.attention import AttentionBackend
from stepgraph.ops.sampling import Sampler, sample
from stepgraph.runtime.buffers import PaddingPolicy, Slot, StaticBuffers
from stepgraph.runtime.capture import CaptureReport, Progress
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.regions import region
from stepgraph.runtime.runner import GraphRunner
from stepgraph.runtime.support import AttentionCGSupport


def decode_slots(max_blocks: int, pad_seq_len: int, penalties_over: int | None = None) -> list[Slot]:
    """The decode step's state. Tokens, positions, lengths and tables live on the device, which advances them;
    sampling parameters belong to the host and travel when the batch changes. penalties_over: see `sampling_slots`.

    Index slots are ZERO: a padded row reads and writes block 0, which is nobody's.
    """
    zero, sentinel = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL
    return [
        Slot("tokens", torch.int64, "request", zero, owner="device"),
        Slot("positions", torch.int64, "request", zero, owner="device"),
        Slot("seq_lens", torch.int32, "request", sentinel, pad_value=pad_seq_len, owner="device"),
        Slot("block_tables", torch.int32, "request", zero, (max_blocks,), owner="device"),
        *sampling_slots(penalties_over),
    ]


def largest_batch(graphs: GraphConfig, max_num_seqs: int) -> int:
    """Rows of the largest decode step: what the ladder pads `max_num_seqs` to, or that itself without graphs."""
    return max_num_seqs if graphs.backend is Backend.DISABLED or graphs.ladder is None else graphs.ladder.max_size


class EngineCore:
    """Requests in, tokens out. Text, files and threads are others' business.

    max_num_seqs: rows that decode at once. chunk_tokens: prefill tokens a step.
    sampler: chooses the tokens. penalties: whether requests may ask for them; takes 4 bytes a row and token of the
        vocabulary.

    Raises:
        ConfigError: graphs over an attention backend that cannot be captured, or a cache that does not fit.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        graphs: GraphConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        chunk_tokens: int,
        sampler: Sampler = sample,
        penalties: bool = True,
    ) -> None:
        if graphs.backend is Backend.FULL and attention.support is AttentionCGSupport.NEVER:
            raise ConfigError(
                f"attention: backend '{attention.name}' cannot be captured on {model.device.type} (support NEVER); "
                f"choose another backend or disable graphs"
            )
        self.model, self.attention = model, attention
        self.penalties = penalties
        self._sample = sampler
        self.max_model_len = max_model_len
        self.kv_cache = allocate_cache(model.config, num_blocks, model.dtype, model.device)
        self.scheduler = Scheduler(BlockPool(num_blocks), max_num_seqs, chunk_tokens)
        rows = largest_batch(graphs, max_num_seqs)
        self._max_blocks = blocks_for(max_model_len)
        vocab = model.config.vocab_size if penalties else None
        slots = decode_slots(self._max_blocks, attention.pad_seq_len, vocab)
        self.buffers = StaticBuffers(max_requests=rows, device=model.device, slots=slots)
        self.runner = GraphRunner(self._decode_step, self.buffers, graphs)
        self._rows_staged = 0

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> CaptureReport:
        return self.runner.capture(progress)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """One token for every decoding request, and for every request whose prefill this step completes."""
        produced = self._decode()
        produced += self._prefill(self.scheduler.plan_prefill())
        return produced

    def _decode(self) -> list[tuple[Request, int]]:
        if not self.scheduler.rows:
            return []
        grown = self.scheduler.grow()
        rows = list(self.scheduler.rows)
        if not rows:
            return []
        inputs = self._sync_rows(rows, grown)
        self.attention.plan([request.num_tokens for request in rows], self.buffers["block_tables"])
        tokens = self.runner(num_requests=len(rows), **inputs).tokens.tolist()
        for request, token in zip(rows, tokens, strict=True):
            request.computed += 1
            request.output.append(token)
        return list(zip(rows, tokens, strict=True))

    def _sync_rows(self, rows: list[Request], grown: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Patch what changed of the device's state; the sampling parameters where the batch changed."""
        for row, index, block in grown:
            self.buffers["block_tables"][row, index] = block
        dirty = self.scheduler.take_dirty_rows()
        if dirty:
            moved = [rows[row] for row in dirty]
            self.buffers.patch(
                dirty,
                tokens=[request.last_token for request in moved],
                positions=[request.num_tokens - 1 for request in moved],
                seq_lens=[request.num_tokens for request in moved],
                block_tables=self._tables(moved),
            )
            if self.penalties:
                mark_rows(self.buffers["seen"], moved, dirty)
        if not dirty and len(rows) == self._rows_staged:
            return {}
        self._rows_staged = len(rows)
        return sampling_inputs(rows, penalties=self.penalties)

    def _decode_step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        **sampling: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The captured step: forward, sample, and advance the rows that are alive."""

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self.attention.decode(q, kv, block_tables, seq_lens, out)

        logits = self.model.logits(self.model.forward(tokens, positions, block_tables, self.kv_cache, attend))
        with region("advance"):
            alive = seq_lens > 0
            positions.add_(alive)
            seq_lens.add_(alive)
        with region("sampling"):
            self._sample(logits, position=positions, out=tokens, **sampling)
        with region("advance"):
            tokens.mul_(alive)
        return {"tokens": tokens}

    def _prefill(self, chunks: list[Chunk]) -> list[tuple[Request, int]]:
        if not chunks:
            return []
        device = self.model.device
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        tokens = torch.tensor([t for c in chunks for t in c.request.tokens(c.start, c.stop)], device=device)
        positions = torch.tensor([p for c in chunks for p in range(c.start, c.stop)], device=device)
        tables = torch.from_numpy(self._tables([chunk.request for chunk in chunks])).to(device)
        seq_lens = torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32, device=device)
        query_start = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        per_token = tables.repeat_interleave(torch.tensor(lengths, device=device), dim=0)

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self.attention.prefill(q, kv, tables, seq_lens, query_start, out, max_query_len=max(lengths))

        hidden = self.model.forward(tokens, positions, per_token, self.kv_cache, attend)
        for chunk in chunks:
            chunk.request.computed = chunk.stop
        done = [index for index, chunk in enumerate(chunks) if chunk.completes]
        if not done:
            return []
        requests = [chunks[index].request for index in done]
        last_rows = query_start[1:].long()[torch.tensor(done, device=device)] - 1
        produced = self._sample_first(requests, self.model.logits(hidden[last_rows]))
        for request, token in produced:
            request.output.append(token)
            self.scheduler.join(request)
        return produced

    def _sample_first(self, requests: list[Request], logits: torch.Tensor) -> list[tuple[Request, int]]:
        device = logits.device
        out = torch.empty(len(requests), dtype=torch.int64, device=device)
        inputs = sampling_inputs(requests, penalties=self.penalties)
        sampling = {name: torch.as_tensor(value).to(device) for name, value in inputs.items()}
        if self.penalties:
            seen = sampling["seen"] = self.buffers["seen"][: len(requests)]  # untouched unless a row asks
            if any(request.params.penalises for request in requests):
                sampling["seen"] = torch.empty_like(seen)
                mark_rows(sampling["seen"], requests, range(len(requests)))
        position = torch.tensor([request.num_tokens for request in requests], device=device)
        self._sample(logits, position=position, out=out, **sampling)
        return list(zip(requests, out.tolist(), strict=True))

    def _tables(self, requests: list[Request]) -> np.ndarray[Any, Any]:
        """int32 [requests, max_blocks]: each request's blocks, then the null block."""
        tables = np.zeros((len(requests), self._max_blocks), dtype=np.int32)
        for row, request in enumerate(requests):
            tables[row, : len(request.blocks)] = request.blocks
        return tables
