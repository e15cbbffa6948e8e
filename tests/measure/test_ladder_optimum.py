"""The dynamic programme: against all ladders there are, its proof, its speed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.measure.ladder_fit.optimum import UNREACHED, best_ladders
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder


def cost(sizes: tuple[int, ...], steps: list[int], times: list[int]) -> int:
    ladder = Ladder(sizes)
    return sum(count * times[ladder.rung(rows) or 0] for rows, count in enumerate(steps) if rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Steps and times by rows; times may fall."""
    largest = draw(st.integers(1, 7))
    steps = draw(st.lists(st.integers(0, 9), min_size=largest, max_size=largest).filter(any))
    return [0, *steps], [0, *draw(st.lists(st.integers(1, 30), min_size=largest, max_size=largest))]


def test_more_rows_than_the_programme_has_memory_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="fitted up to 4096; name fewer with --max-rows"):
        best_ladders(np.ones(5000, dtype=np.int64), np.ones(5000, dtype=np.int64), 3)


@given(cases(), st.integers(1, 9))
def test_no_ladder_is_better(case: tuple[list[int], list[int]], most: int) -> None:
    steps, times = case
    largest = len(times) - 1
    every = [
        (*below, largest) for count in range(min(most, largest)) for below in combinations(range(1, largest), count)
    ]
    optima = best_ladders(np.array(steps), np.array(times), most)
    found = optima.ladder(most)
    assert len(found) <= most and found[-1] == largest
    assert optima.cost(most) == cost(found, steps, times) == min(cost(sizes, steps, times) for sizes in every)
    assert optima.prove(most) > 0


def test_a_larger_size_may_be_the_faster_one() -> None:
    steps, times = np.array([0, 0, 0, 5, 0, 0]), np.array([0, 1, 2, 9, 4, 10])
    assert best_ladders(steps, times, 3).ladder(3) == (4, 5)


def test_what_gains_nothing_is_left_out() -> None:
    steps, times = np.array([0, 0, 7, 0, 0, 1]), np.array([0, 1, 2, 3, 4, 5])
    optima = best_ladders(steps, times, 5)
    assert (optima.most, optima.ladder(5), optima.ladder(1)) == (2, (2, 5), (5,))


def test_a_wrong_potential_is_no_proof() -> None:
    optima = best_ladders(np.array([0, 3, 2, 1]), np.array([0, 5, 6, 9]), 2)
    for row, wrong in ((2, optima.potentials[2, 3] + 1), (0, 0)):
        potentials = optima.potentials.copy()
        potentials[row, 3] = wrong
        with pytest.raises(AssertionError):
            replace(optima, potentials=potentials).prove(2)


def test_512_sizes_within_a_second() -> None:
    rng = np.random.default_rng(0)
    steps, times = rng.integers(1, 10**6, 513), np.cumsum(rng.integers(1, 10**5, 513))
    steps[0] = times[0] = 0
    started = process_time()
    optima = best_ladders(steps, times, 512)
    assert process_time() - started < 1
    assert optima.most == 512 and optima.ladder(512) == tuple(range(1, 513))
    assert len(optima.ladder(12)) == 12 and optima.prove(12) > 10**6


@pytest.mark.parametrize(
    ("steps", "times", "most", "message"),
    [
        ([0, 0], [0, 1], 1, "at least one row"),
        ([1, 1], [0, 1], 1, "at least one row"),
        ([0, 1, 1], [0, 1], 1, "no more rows"),
        ([0, 1], [0, 0], 1, "positive"),
        ([0, 1], [0, 1], 0, "at least one"),
        ([0, 2**32], [0, UNREACHED // 2**30], 1, "too many steps"),
    ],
)
def test_bad_input(steps: list[int], times: list[int], most: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_ladders(np.array(steps), np.array(times), most)
