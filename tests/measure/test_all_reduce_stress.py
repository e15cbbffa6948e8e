"""Many sums, each checked: on the tape over gloo, right ones and one that gives what the last one gave."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from comm.ranks_in_processes import results, run_ranks

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.measure.all_reduce.stress import Stress, stress


class Stale(AllReduce):
    """Now and then a sum begins with what the sum before it left there, as a slot that was not wiped would make it."""

    left: torch.Tensor | None = None
    calls = 0

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        found, self.calls = super().__call__(x, residual), self.calls + 1
        if self.calls % 5 == 0 and self.left is not None:
            count = min(found.numel(), self.left.numel())
            found[:count] = self.left[:count]
        self.left = found
        return found


class Overwriting(AllReduce):
    """Writes to the residual, as one that reaches beyond its own memory would to whatever lies there."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        found = super().__call__(x, residual)
        if residual is not None:
            residual[-1] = 5
        return found


def stressed(group: Group) -> tuple[Stress, ...]:
    def run(all_reduce: AllReduce) -> Stress:
        return stress(group, all_reduce, captured=240, graphs=4, most_bytes=1024)

    return tuple(run(kind(group, why_library="a CPU")) for kind in (AllReduce, Stale, Overwriting))


def test_each_sum_is_checked(tmp_path: Path) -> None:
    for right, wrong, _ in results(run_ranks(2, tmp_path, stressed)):
        assert right.wrong == 0 < wrong.wrong
        assert right.faults == []
        assert right.captured == 240 and right.eager >= 80
        assert right.algorithms == {"library, own": 80}


def test_it_says_which_sums_were_wrong_and_what_was_overwritten(tmp_path: Path) -> None:
    first = r"rank 0: turn 0: library, own, eager; graph 0, sum 4, \d+ bytes, factor 5: element \d+ is \S+, not \S+"
    for _, wrong, overwritten in results(run_ranks(2, tmp_path, stressed)):
        assert re.fullmatch(first, wrong.faults[0])
        assert any(one.startswith("rank 1: turn 0") for one in wrong.faults)
        by_way = [one for one in wrong.faults if "were wrong once or more" in one]
        assert len(by_way) == 2 and "'library, own, captured': " in by_way[0]
        assert any(re.search(r"rank 1: pattern 0, \d+ bytes: 1 elements were overwritten", one)
                   for one in overwritten.faults)  # fmt: skip
