"""Medians, intervals and turns."""

from __future__ import annotations

import statistics

import pytest

from stepgraph.measure.stats import in_turns, interval, quantiles, ratio


def test_quantiles() -> None:
    assert quantiles([float(i) for i in range(11)]) == {"p10": 1.0, "median": 5.0, "p90": 9.0}
    assert quantiles([3.0]) == {"p10": 3.0, "median": 3.0, "p90": 3.0}


@pytest.mark.parametrize("function", [quantiles, interval])
def test_no_samples_are_refused(function) -> None:
    with pytest.raises(ValueError, match="no samples"):
        function([])


def test_the_interval_holds_the_median_narrows_and_repeats() -> None:
    few, many = [float(i % 10) for i in range(20)], [float(i % 10) for i in range(2000)]
    low, high = interval(few)
    assert low <= statistics.median(few) <= high
    narrow = interval(many)
    assert narrow[1] - narrow[0] < high - low
    assert interval(few) == (low, high)
    assert interval([2.0, 2.0]) == (2.0, 2.0)


def test_a_ratio_is_of_pairs_and_not_of_medians() -> None:
    drifting = [(2.0 * k, 1.0 * k) for k in (1, 5, 100)]
    assert ratio(drifting) == (2.0, 2.0, 2.0)


def test_turns_swap() -> None:
    seen: list[str] = []

    def measure(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    pairs = in_turns(3, lambda: measure("a"), lambda: measure("b"))
    assert "".join(seen) == "abbaab"
    assert pairs == [(1.0, 2.0), (4.0, 3.0), (5.0, 6.0)]
