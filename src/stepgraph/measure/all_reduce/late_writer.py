"""A kernel in front of a sum that lets it in before it has written what is summed: a sum that does not wait shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from stepgraph.ops.overlap import can_overlap

WriteLate = Callable[[torch.Tensor, torch.Tensor], None]
"""(source, target): copies one to the other, late. Contiguous, of one shape and dtype."""


def late_writer(device: torch.device) -> WriteLate | None:
    """None where no kernel lets the next one in early, or there is no Triton to write it in."""
    if not can_overlap(device) or find_spec("triton") is None:
        return None
    from stepgraph.measure.all_reduce.late_kernel import write_late

    return write_late
