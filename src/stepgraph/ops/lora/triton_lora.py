"""Adapters as two launches a projection: A x in chunks of its columns, then B over their sum.

Programs without a row that has their adapter end at once, so that a recording for many adapters costs little where
there are few. Sums are made in a fixed order.

Where the device knows programmatic launches, each kernel starts while the one in front still runs, reads what that one
does not write, and then waits for it in every program, so that whoever waits for the last one waits for all.
"""

from __future__ import annotations

import torch

from stepgraph.ops.lora import triton_rows, triton_tiles
from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.overlap import can_overlap

_FEW_ROWS = 16


class TritonLora:
    """Captured once a step size: reads the rows' adapters where they lie. Ranks are powers of two of at least 16.

    overlap: programmatic dependent launch; by default where it exists.
    """

    def __init__(self, rows: LoraRows, overlap: bool | None = None) -> None:
        self._rows = rows
        self._overlap = can_overlap(rows.index.device) if overlap is None else overlap
        self._form = triton_rows if len(rows.index) <= _FEW_ROWS else triton_tiles

    def __call__(self, pair: LoraPair, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [rows, in], out: [rows, out], added to in place; both contiguous within a row."""
        self.expand(pair, self.shrink(pair, x), out)

    def shrink(self, pair: LoraPair, x: torch.Tensor) -> torch.Tensor:
        """The first launch. Its result is for `expand` alone."""
        return self._form.shrink(pair, x, self._rows, overlap=self._overlap)

    def expand(self, pair: LoraPair, shrunk: torch.Tensor, out: torch.Tensor) -> None:
        """The second launch."""
        self._form.expand(pair, shrunk, out, self._rows, overlap=self._overlap)
