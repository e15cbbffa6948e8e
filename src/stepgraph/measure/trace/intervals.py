"""Arithmetic on intervals of time: what they cover together, what lies between, and how much is counted twice.

An interval is (start, stop) with start <= stop, in any unit; what comes back has the same unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that neither overlap nor touch, in order.

    Raises:
        ValueError: one ends before it starts.
    """
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop < start:
            raise ValueError(f"an interval from {start} to {stop}")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths, each counted in full."""
    return sum(stop - start for start, stop in intervals)


def overlap(intervals: Sequence[Interval]) -> float:
    """By how much the sum of the lengths exceeds the time that they cover."""
    return length(intervals) - length(union(intervals))
