"""Small tensors of all ranks, side by side on each."""

from __future__ import annotations

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.choice import Algorithm, Choice, Source
from stepgraph.comm.group import Group
from stepgraph.comm.record import Collective
from stepgraph.runtime.platforms.capturing import is_capturing
from stepgraph.runtime.platforms.tape import opaque
from stepgraph.runtime.regions import region

_PUSHED = Choice(Algorithm.PUSH, Source.PUSHED, "a few numbers a row")
_LIBRARY = Choice(Algorithm.LIBRARY, Source.OWN, "no kernels, or more than they gather")


class Gather:
    """Pushes what is small enough, where the group's all-reduce has kernels; the library gathers the rest.

    Of one communicator with the group's all-reduces.
    """

    def __init__(self, group: Group, all_reduce: AllReduce) -> None:
        self._group, self._log, self._in_flight = group, all_reduce.log, all_reduce.in_flight
        self._kernels = all_reduce.kernels
        self._into = opaque(group.gather_into)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor: contiguous. Returns [world, *tensor.shape], in the order of the ranks."""
        capturing = is_capturing(self._group.device)
        kernels = self._kernels if self._kernels is not None and self._kernels.gathers(tensor) else None
        if capturing:
            choice = _LIBRARY if kernels is None else _PUSHED
            self._log.add(Collective("gather", tensor.numel() * tensor.element_size(), choice))
        self._in_flight.enter(capturing=capturing)
        try:
            with region("gather"):
                if kernels is not None:
                    return kernels.gather(tensor)
                out = torch.empty((self._group.world, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
                self._into(out, tensor)
                return out
        finally:
            self._in_flight.leave(capturing=capturing)
