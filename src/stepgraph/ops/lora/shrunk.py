"""What the first launch of an adapter leaves for the second."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shrunk:
    """A x in sums over chunks of x's columns. Unset where a row has no adapter.

    sums: float32 [chunks, rows, parts x rank].
    squares: float32 [chunks, rows], where an RMSNorm came along, of which the sums have the weight only: the squares of
        x's elements, summed over the same chunks. eps: of that norm.
    """

    sums: torch.Tensor
    squares: torch.Tensor | None = None
    eps: float = 0.0
