"""Adapters as two launches a projection: A x in chunks of its columns, then B over their sum.

Programs without a row that has their adapter end at once, so that a recording for many adapters costs little where
there are few. Sums are made in a fixed order. Up to 16 rows take the norm in front of their projection along.

Where the device knows programmatic launches, each kernel starts while the one in front still runs, reads what that one
does not write, and then waits for it in every program, so that whoever waits for the last one waits for all.
"""

from __future__ import annotations

import torch

from stepgraph.ops.fused.small import rms_norm
from stepgraph.ops.lora import triton_rows, triton_tiles
from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.lora.shrunk import Shrunk
from stepgraph.ops.norm import Norm
from stepgraph.ops.overlap import can_overlap

_FEW_ROWS = 16


class TritonLora:
    """Captured once a step size: reads the rows' adapters where they lie. Ranks are powers of two of at least 16.

    overlap: programmatic dependent launch; by default where it exists.
    """

    def __init__(self, rows: LoraRows, overlap: bool | None = None) -> None:
        self._rows = rows
        self._overlap = can_overlap(rows.index.device) if overlap is None else overlap
        self._few = len(rows.index) <= _FEW_ROWS

    def __call__(self, pair: LoraPair, x: torch.Tensor, out: torch.Tensor, norm: Norm | None = None) -> None:
        """As in `Adapt`. Contiguous within a row is enough, but for rows that are normed."""
        self.expand(pair, self.shrink(pair, x, norm), out)

    def shrink(self, pair: LoraPair, x: torch.Tensor, norm: Norm | None = None) -> Shrunk:
        """The first launch; of many rows that are normed, behind one for the norm."""
        if self._few:
            return triton_rows.shrink(pair, x, norm, self._rows, overlap=self._overlap)
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, overlap=self._overlap)
        return triton_tiles.shrink(pair, x, self._rows, overlap=self._overlap)

    def expand(self, pair: LoraPair, shrunk: Shrunk, out: torch.Tensor) -> None:
        """The second launch."""
        form = triton_rows if self._few else triton_tiles
        form.expand(pair, shrunk, out, self._rows, overlap=self._overlap)
