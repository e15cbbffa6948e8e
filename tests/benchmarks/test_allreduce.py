"""The benchmark of all-reduces: what it throws away, and what it complains about."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from stepgraph.measure.all_reduce.stress import Stress, small_thresholds

WAYS = ("one_shot_push, pushed", "one_shot_pull, pointer row", "two_shot_pull, pointer row", "library, own")


def of(*names: str, wrong: int = 0, faults: tuple[str, ...] = ()) -> Any:
    return Stress(20, 0, wrong, dict.fromkeys(names, 5), list(faults))


@pytest.fixture
def h200_allreduce(benchmark: Callable[[str], ModuleType]) -> Any:
    return benchmark("h200_allreduce")


def test_the_first_size_is_measured_twice_and_its_first_times_are_thrown_away(
    h200_allreduce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        rank = 1

    asked: list[int] = []

    def time_ways(group: Any, all_reduce: Any, ways: Any, nbytes: int, *, samples: int) -> Any:
        asked.append(nbytes)
        return {("one_shot_push", True): [float(len(asked))]}

    for name in ("our_ways", "torch_ways"):
        monkeypatch.setattr(h200_allreduce, name, lambda *_: [])
    monkeypatch.setattr(h200_allreduce, "time_ways", time_ways)
    times = h200_allreduce.measure(Group(), None, 7, ours=True)
    sizes = list(h200_allreduce.SIZES)
    assert asked == [sizes[0], *sizes] and list(times) == sizes
    assert times[sizes[0]]["one_shot_push", True] == [2.0]


def test_the_stress_must_have_had_every_algorithm_in_graphs(h200_allreduce: Any) -> None:
    everything = [f"{way}, captured, behind {what}" for way in WAYS for what in ("torch's", "a sum", "a late writer")]
    fitted = of("one_shot_push, pushed, captured, behind a sum")
    assert h200_allreduce.stress_complaints({"fitted thresholds": fitted, "small thresholds": of(*everything)}) == []
    less = of(*(name.replace("captured", "eager") if "two_shot" in name else name for name in everything[:-1]))
    told = h200_allreduce.stress_complaints({"fitted thresholds": of(wrong=3, faults=("x",)), "small thresholds": less})
    assert told == [
        "fitted thresholds: 3 wrong elements in the stress test",
        "fitted thresholds: x",
        "small thresholds: no graph has two_shot_pull, pointer row",
    ]
    none = of(*(name for name in everything if "late" not in name))
    assert h200_allreduce.stress_complaints({"small thresholds": none}) == ["no sum stood behind a late writer"]


def test_each_table_has_half_of_the_sums(h200_allreduce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Made:
        def __init__(self, table: Any) -> None:
            self.table = table

        def close(self) -> None:
            asked.append(("closed", 0))

    class Group:
        world, device = 2, "cpu"

    monkeypatch.setattr(h200_allreduce, "make_all_reduce", lambda group, table: Made(table))
    monkeypatch.setattr(
        h200_allreduce, "stress", lambda group, made, captured, **_: asked.append((made.table.source, captured))
    )
    limits = h200_allreduce.WIDE
    h200_allreduce.stressed(Group(), h200_allreduce.Table("any", 2, limits, limits, "fitted"), 50_000)
    small = small_thresholds(2).source
    assert asked == [("fitted", 25_000), ("closed", 0), (small, 25_000), ("closed", 0)]
