"""Adapters in plain torch, on any device: the truth in tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.norm import Norm


class ReferenceLora:
    """Every active adapter computes every row, and a row keeps its own one's part. Made once a step."""

    def __init__(self, rows: LoraRows) -> None:
        numbers = torch.arange(rows.active, dtype=torch.int32, device=rows.index.device)
        self._mine = rows.index[:, None] == numbers  # [rows, active]
        self._slots = torch.where(self._mine, rows.slot[:, None], 0).amax(0).long()  # one that is not there: slot 0

    def __call__(self, pair: LoraPair, x: torch.Tensor, out: torch.Tensor, norm: Norm | None = None) -> None:
        """As in `Adapt`."""
        if norm is not None:
            x = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        a, b = pair.a[self._slots], pair.b[self._slots]
        parts = len(pair.ends)
        shrunk = F.linear(x, a.flatten(0, 1)).view(x.shape[0], -1, parts, pair.rank)
        shrunk = torch.where(self._mine[:, :, None, None], shrunk, 0)
        for part, (start, stop) in enumerate(zip((0, *pair.ends), pair.ends, strict=False)):
            weight = b[:, start:stop].permute(0, 2, 1).flatten(0, 1)  # [active x rank, columns]
            out[:, start:stop].addmm_(shrunk[:, :, part].flatten(1), weight)
