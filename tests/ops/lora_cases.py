"""Random adapters of one projection, rows that have them or not, and what they add, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.ops.lora import LoraPair, LoraRows
from stepgraph.ops.norm import Norm


@dataclass(frozen=True)
class LoraCase:
    pair: LoraPair
    rows: LoraRows
    x: torch.Tensor
    out: torch.Tensor
    norm: Norm | None

    def want(self) -> torch.Tensor:
        """In float64, one row after another."""
        out, x, rank = self.out.double(), self.x.double(), self.pair.rank
        if self.norm is not None:
            x = F.rms_norm(x, x.shape[1:], self.norm.weight.double(), self.norm.eps)
        for row, (index, slot) in enumerate(zip(self.rows.index.tolist(), self.rows.slot.tolist(), strict=True)):
            if not 0 <= index < self.rows.active:
                continue
            shrunk = self.pair.a[slot].double() @ x[row]
            for part, (start, stop) in enumerate(zip((0, *self.pair.ends), self.pair.ends, strict=False)):
                mine = shrunk[part * rank : (part + 1) * rank]
                out[row, start:stop] += self.pair.b[slot, start:stop].double() @ mine
        return out


def lora_case(
    *,
    rows: int,
    width: int,
    ends: tuple[int, ...],
    active: int,
    norm: bool = False,
    rank: int = 16,
    slots: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoraCase:
    """Some rows have no adapter, and some numbers of the active ones may have no row. Padded inputs are NaN.

    norm: whether one comes along.
    """
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=noise) * shape[-1] ** -0.5).to(device, dtype)

    index = torch.randint(-1, active, (rows,), generator=noise).int()
    slot = torch.randperm(slots, generator=noise).int()[index.clamp_min(0)]
    x = random(rows, width)
    x[(index < 0).to(device)] = float("nan")  # as a padded row may be
    pair = LoraPair(random(slots, len(ends) * rank, width), random(slots, ends[-1], rank), ends)
    mine, out = LoraRows(index.to(device), slot.to(device), active), random(rows, ends[-1])
    return LoraCase(pair, mine, x, out, Norm(1 + random(width), 1e-5) if norm else None)
