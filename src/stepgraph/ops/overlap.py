"""Programmatic dependent launch: where a kernel may start before the one in front of it has ended."""

from __future__ import annotations

import torch


def can_overlap(device: torch.device | str) -> bool:
    """Whether the device knows it: compute capability 9.0 or more."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launched(overlap: bool) -> dict[str, bool]:
    """The launch option of a Triton kernel that overlaps; an older Triton has none."""
    return {"launch_pdl": True} if overlap else {}
