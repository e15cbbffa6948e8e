"""Medians, their spread, and comparisons in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 2000
"""Resamples of a bootstrap."""


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Median with the tenth and ninetieth percentile, in the samples' unit. Raises ValueError without samples."""
    if not samples:
        raise ValueError("quantiles: no samples")
    p10, median, p90 = np.quantile(np.asarray(samples, dtype=np.float64), (0.1, 0.5, 0.9)).tolist()
    return {"p10": p10, "median": median, "p90": p90}


def interval(samples: Sequence[float], *, rounds: int = ROUNDS) -> tuple[float, float]:
    """A 95 % interval for the median: a bootstrap over the samples, the same for the same samples."""
    if not samples:
        raise ValueError("interval: no samples")
    values, rng = np.asarray(samples, dtype=np.float64), np.random.default_rng(0)
    medians = [np.median(rng.choice(values, len(values))) for _ in range(rounds)]
    low, high = np.quantile(medians, (0.025, 0.975)).tolist()
    return low, high


def ratio(pairs: Sequence[tuple[float, float]], *, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """The median of a/b over paired samples, with a 95 % bootstrap interval over the pairs."""
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios), *interval(ratios, rounds=rounds)


def in_turns(rounds: int, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """(a, b) per round, measured AB, BA, AB, …, so that a drift of the machine meets both alike."""
    pairs = []
    for turn in range(rounds):
        if turn % 2 == 0:
            first = a()
            pairs.append((first, b()))
        else:
            second = b()
            pairs.append((a(), second))
    return pairs
