"""Arithmetic on intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.measure.trace.intervals import length, overlap, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


def test_what_overlaps_or_touches_is_joined() -> None:
    assert union([(5, 8), (0, 2), (2, 3), (6, 7), (7.5, 9)]) == [(0, 3), (5, 9)]


def test_overlap_is_what_the_sum_exceeds_the_union_by() -> None:
    assert overlap([(0, 10), (8, 18), (8, 9)]) == 3
    assert overlap([]) == 0


def test_an_interval_that_ends_before_it_starts() -> None:
    with pytest.raises(ValueError, match="from 3 to 2"):
        union([(3, 2)])


@given(INTERVALS)
def test_union_covers_the_same_time_once(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert all(a[1] < b[0] for a, b in zip(merged, merged[1:], strict=False))
    covered = {t for start, stop in intervals for t in range(start, stop)}
    assert length(merged) == len(covered)
    assert length(intervals) == len(covered) + overlap(intervals)
