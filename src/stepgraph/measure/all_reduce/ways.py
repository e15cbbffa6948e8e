"""The ways to sum a tensor over ranks that are measured beside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.choice import Algorithm, Choice, Source
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group


@dataclass(frozen=True)
class Way:
    """prepare: called with bytes, it returns what sums once, for capturing and for eager use; None: not of this size.

    captured: whether it is captured as what it is in a graph, or eager.
    """

    name: str
    captured: bool
    prepare: Callable[[int], Callable[[], object] | None]


def our_ways(group: Group, all_reduce: AllReduce, *, dtype: torch.dtype = torch.bfloat16) -> list[Way]:
    """Each algorithm captured and eager; the library as `library`."""
    ways = []
    for captured in (True, False):
        pulled = Source.ROW if captured else Source.STAGED
        for algorithm, source in (
            (Algorithm.PUSH, Source.PUSHED),
            (Algorithm.PULL, pulled),
            (Algorithm.TWO_SHOT, pulled),
            (Algorithm.LIBRARY, Source.OWN),
        ):
            choice = Choice(algorithm, source, "measured")
            ways.append(Way(algorithm.value, captured, _ours(group, all_reduce, choice, captured, dtype)))
    return ways


def torch_ways(group: Group, *, dtype: torch.dtype = torch.bfloat16) -> list[Way]:
    """torch's one-shot and two-shot operators over symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric_memory

    def prepare(one_shot: bool) -> Callable[[int], Callable[[], object]]:
        def make(nbytes: int) -> Callable[[], object]:
            x = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=group.device).zero_()
            symmetric_memory.rendezvous(x, group.name)
            operators = torch.ops.symm_mem
            sum_over_ranks = operators.one_shot_all_reduce if one_shot else operators.two_shot_all_reduce_
            sum_over_ranks(x, "sum", group.name)
            return lambda: sum_over_ranks(x, "sum", group.name)

        return make

    return [
        Way(f"torch {name}", captured, prepare(one_shot))
        for captured in (True, False)
        for name, one_shot in (("one-shot", True), ("two-shot", False))
    ]


def _ours(
    group: Group, all_reduce: AllReduce, choice: Choice, captured: bool, dtype: torch.dtype
) -> Callable[[int], Callable[[], object] | None]:
    def make(nbytes: int) -> Callable[[], object] | None:
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=group.device)
        try:
            all_reduce.require(choice, x, capturing=captured)
        except CommError:
            return None
        if choice.source is not Source.ROW:
            all_reduce(x, choice=choice)  # whatever is loaded at the first call must be there before a capture
        return lambda: all_reduce(x, choice=choice)

    return make
