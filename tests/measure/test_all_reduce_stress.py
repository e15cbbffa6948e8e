"""Many sums, each checked: on the tape over gloo, right ones and one that gives what the last one gave."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from comm.ranks_in_processes import results, run_ranks

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.choice import Choice, Facts
from stepgraph.comm.group import Group
from stepgraph.measure.all_reduce.stress import _FACTORS, _SCALES, Stress, _Checked, small_thresholds, stress
from stepgraph.runtime.platforms.tape import opaque


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


class Early(AllReduce):
    """Straight behind another sum it does not wait for it: it sums what was there before."""

    last: torch.Tensor | None = None
    before: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        if x is self.last and self.before is not None:
            x.copy_(self.before)
        self.before = x.clone()
        self.last = super().__call__(x, residual)
        return self.last


class Hasty(AllReduce):
    """It does not wait for a kernel that writes late: it sums what was there before."""

    target: torch.Tensor | None = None
    before: torch.Tensor | None = None

    def write_late(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.target, self.before = target, target.clone()
        target.copy_(source)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, **more: object) -> torch.Tensor:
        if x is self.target and self.before is not None:
            x.copy_(self.before)
        return super().__call__(x, residual)


class Kernels:
    """Sums by the library, whatever was chosen."""

    facts = Facts(capturing=False, push_bytes=16 << 20, stage_bytes=16 << 20)

    def __init__(self, group: Group) -> None:
        self._group = group

    def unfit(self, x: torch.Tensor) -> str | None:
        return None

    def run(self, choice: Choice, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        opaque(self._group.all_reduce_)(x)
        return x if residual is None else x.add_(residual)

    def exchange(self) -> None:
        pass

    def check(self) -> None:
        pass


def copied(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def stressed(group: Group) -> dict[str, Stress]:
    def run(all_reduce: AllReduce, **more: Any) -> Stress:
        return stress(group, all_reduce, **{"captured": 240, "graphs": 4, "most_bytes": 1024, **more})

    found = {kind.__name__: run(kind(group, why_library="a CPU")) for kind in (AllReduce, Stale, Overwriting, Early)}
    hasty = Hasty(group, why_library="a CPU")
    table = small_thresholds(group.world)
    fast = AllReduce(group, Kernels(group), table)  # type: ignore[arg-type]
    return {
        **found,
        "Hasty": run(hasty, write_late=hasty.write_late),
        "late": run(AllReduce(group, why_library="a CPU"), write_late=copied),
        "small": run(fast, most_bytes=4 << 20, captured=100, graphs=5),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Stress]]:
    """By what summed, of each of two ranks."""
    return results(run_ranks(2, tmp_path_factory.mktemp("ranks"), stressed))


def test_each_sum_is_checked(found: list[dict[str, Stress]]) -> None:
    for by_kind in found:
        right = by_kind["AllReduce"]
        assert right.wrong == 0 < by_kind["Stale"].wrong
        assert right.faults == []
        assert right.captured == 240 and right.eager >= 80


def test_it_says_which_sums_were_wrong_and_what_was_overwritten(found: list[dict[str, Stress]]) -> None:
    first = r"rank 0: turn 0: library, own, eager; graph 0, run 4, \d+ bytes, factor 5: element \d+ is \S+, not \S+"
    for by_kind in found:
        wrong = by_kind["Stale"]
        assert re.fullmatch(first, wrong.faults[0])
        assert any(one.startswith("rank 1: turn 0") for one in wrong.faults)
        by_way = [one for one in wrong.faults if "were wrong once or more" in one]
        assert len(by_way) == 2 and "'library, own, captured': " in by_way[0]
        assert any(re.search(r"rank 1: pattern 0, \d+ bytes: 1 elements were overwritten", one)
                   for one in by_kind["Overwriting"].faults)  # fmt: skip


def test_it_says_how_many_sums_each_way_made_and_behind_what(found: list[dict[str, Stress]]) -> None:
    for by_kind in found:
        captured = {name: n for name, n in by_kind["late"].algorithms.items() if "captured" in name}
        in_a_graph = {"torch's": 6 + 2 + 1, "a sum": 4 + 3 + 1, "a late writer": 3}  # of 20 sums
        assert captured == {f"library, own, captured, behind {what}": 12 * n for what, n in in_a_graph.items()}
        assert sum(by_kind["late"].algorithms.values()) == by_kind["late"].captured + by_kind["late"].eager
        assert not any("late writer" in name for name in by_kind["AllReduce"].algorithms)


def test_a_sum_that_does_not_wait_for_the_one_before_is_seen(found: list[dict[str, Stress]]) -> None:
    for by_kind in found:
        early = by_kind["Early"]
        assert early.wrong > 0
        told = [one for one in early.faults if "turn" in one]
        assert told and all("in a row" in one for one in told)


def test_a_sum_that_does_not_wait_for_a_late_writer_is_seen(found: list[dict[str, Stress]]) -> None:
    for by_kind in found:
        assert by_kind["late"].wrong == 0 and by_kind["late"].faults == []
        assert by_kind["Hasty"].wrong > 0
        told = [one for one in by_kind["Hasty"].faults if "turn" in one]
        assert told and all("written late" in one for one in told)


def test_with_small_thresholds_every_algorithm_stands_in_graphs(found: list[dict[str, Stress]]) -> None:
    for by_kind in found:
        small = by_kind["small"]
        assert small.wrong == 0 and small.faults == []
        ways = {name.rpartition(", behind")[0] for name in small.algorithms}
        for way in (
            "one_shot_push, pushed",
            "one_shot_pull, pointer row",
            "two_shot_pull, pointer row",
            "library, own",
        ):
            assert f"{way}, captured" in ways


@pytest.mark.parametrize("world", range(2, 9))
def test_what_chains_sum_stays_exact_in_bfloat16(world: int) -> None:
    class Group:
        device, rank = torch.device("cpu"), 0

        def __init__(self, rank: int) -> None:
            self.rank, self.world = rank, world

    parts = [_Checked(Group(rank), None, torch.bfloat16, 1, None) for rank in range(world)]  # type: ignore[arg-type]
    total = parts[0]._total
    assert sum(part._mine for part in parts) == total
    assert len({part._mine for part in parts}) == world
    for factor, scale in product(range(1, _FACTORS + 1), _SCALES):
        partial = [sum(part._mine for part in parts[: n + 1]) for n in range(world)]
        partial += [n * total * world**link for n in range(1, world + 1) for link in (0, 1)]
        for value in partial:
            exact = value * factor * scale
            assert torch.tensor(exact).to(torch.bfloat16).item() == exact, (factor, scale, value)
