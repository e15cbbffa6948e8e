"""Thresholds from times."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.comm.thresholds import Thresholds, read_table
from stepgraph.measure.all_reduce import tune as tune_module
from stepgraph.measure.all_reduce.fit import ORDER, crossovers_differ, fit_thresholds
from stepgraph.measure.all_reduce.timing import Times
from stepgraph.measure.all_reduce.tune import fitted

SIZES = [1 << power for power in range(10, 18)]


def by_size(**took: list[float]) -> dict[str, dict[int, float]]:
    return {name: dict(zip(SIZES, times, strict=False)) for name, times in took.items()}


def algorithm(limits: Thresholds, size: int) -> str:
    for name, limit in zip(ORDER, (limits.push, limits.pull, limits.two_shot), strict=False):
        if size <= limit:
            return name
    return "library"


def test_each_algorithm_where_it_is_the_fastest() -> None:
    times = by_size(
        one_shot_push=[1, 1, 2, 4, 8, 16, 32, 64],
        one_shot_pull=[3, 3, 3, 3, 6, 12, 24, 48],
        two_shot_pull=[5, 5, 5, 5, 5, 6, 12, 24],
        library=[9, 9, 9, 9, 9, 9, 9, 9],
    )
    assert fit_thresholds(SIZES, times) == Thresholds(SIZES[2], SIZES[3], SIZES[5])


def test_an_algorithm_that_never_wins_is_left_out() -> None:
    times = by_size(one_shot_push=[1] * 4 + [9] * 4, one_shot_pull=[20] * 8, two_shot_pull=[5] * 8, library=[30] * 8)
    limits = fit_thresholds(SIZES, times)
    assert limits.push == limits.pull == SIZES[3] and limits.two_shot == SIZES[7]


def test_sizes_that_an_algorithm_does_not_do_go_to_another() -> None:
    times = by_size(one_shot_push=[1] * 3, library=[9] * 8)
    assert fit_thresholds(SIZES, times) == Thresholds(SIZES[2], SIZES[2], SIZES[2])


TOOK = st.lists(st.floats(0.5, 500), min_size=len(SIZES), max_size=len(SIZES))


@given(st.tuples(TOOK, TOOK, TOOK, TOOK))
def test_no_other_thresholds_have_less_regret(took: tuple[list[float], ...]) -> None:
    times = by_size(**dict(zip(ORDER, took, strict=True)))

    def regret(limits: Thresholds) -> float:
        return sum(math.log(times[algorithm(limits, size)][size]) for size in SIZES)

    found = regret(fit_thresholds(SIZES, times))
    edges = [0, *SIZES]
    others = [Thresholds(a, b, c) for a in edges for b in edges if b >= a for c in edges if c >= b]
    assert found <= min(regret(other) for other in others) + 1e-9


def test_what_is_measured_first_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def time_ways(group: object, all_reduce: object, ways: object, nbytes: int, *, samples: int) -> Times:
        asked.append((nbytes, samples))
        return {("library", captured): [float(len(asked))] for captured in (True, False)}

    class Group:
        device, world = "cuda", 2

    monkeypatch.setattr(tune_module, "time_ways", time_ways)
    monkeypatch.setattr(tune_module, "our_ways", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    tuned = tune_module.tune(Group(), None, sizes=SIZES[:2], samples=7)  # type: ignore[arg-type]
    assert asked == [(SIZES[0], 1), (SIZES[0], 7), (SIZES[1], 7)]
    assert tuned.times[SIZES[0]]["library", True] == [2.0]


def test_a_table_for_both() -> None:
    sample = {("one_shot_push", True): [2.0, 3.0, 9.0], ("library", True): [8.0] * 3}
    times = {SIZES[0]: {**sample, ("one_shot_push", False): [9.0] * 3, ("library", False): [8.0] * 3}}
    table = fitted("some card", 2, times)
    assert table.captured.push == SIZES[0] and table.eager.push == 0
    assert crossovers_differ(table.captured, table.eager)
    assert "tune allreduce" in table.source
    assert read_table(json.dumps(table.as_dict()), "here") == table
