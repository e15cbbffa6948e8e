"""An RMSNorm that a kernel takes along."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Norm:
    """Of what the kernel reads. weight: [width], in the model's dtype."""

    weight: torch.Tensor
    eps: float
