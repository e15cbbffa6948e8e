"""Fits a ladder to traffic: the optimum of a histogram, and histograms that follow from the ladder's own step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepgraph.measure.ladder_fit.histogram import Histogram
from stepgraph.measure.ladder_fit.optimum import Integers, Optima, best_ladders
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.server import Server, Traffic, score
from stepgraph.measure.ladder_fit.simulate import Served
from stepgraph.runtime.ladder import Ladder

LOADS = (0.9, 1.0, 1.1)
"""Times the arrival rate: a ladder that fits one rate alone may fall off a cliff a little above it."""

ROUNDS = 8
"""Longer steps gather more rows, which need other sizes. The histogram settles within these."""

WEIGHT = 10**9
"""A histogram's steps are scaled to this sum, as integers."""


@dataclass(frozen=True)
class Proof:
    """Of a ladder's cost on the histogram that it is the optimum of.

    bound, cost: ns a step, without `row_ns`; no ladder of so many sizes costs less than `bound`, and this one costs
    `cost`. arcs: how many inequalities say so. steps: the histogram, by number of rows, scaled to `WEIGHT`.
    """

    bound: float
    cost: float
    arcs: int
    steps: Integers


@dataclass(frozen=True)
class Fitted:
    """round: of `ROUNDS`, the one whose ladder served the traffic best."""

    ladder: Ladder
    proof: Proof
    round: int


def fit_ladder(server: Server, given: Requests | Histogram, most: int) -> Fitted:
    """At most `most` sizes, the last of them the server's most rows.

    For requests: they are simulated at `LOADS` with every size captured; the sizes best for the sum of these histograms
    are simulated in turn, their histograms join the sum, and so on for `ROUNDS`. Of these ladders it is the one whose
    steps, simulated, are the shortest, as a mean over the loads. A histogram has one round.

    Raises:
        ConfigError: a histogram has steps of more rows, or `most` is below 1.
    """
    loads = [given.faster(load) for load in LOADS] if isinstance(given, Requests) else [given]
    traffics = [server.traffic(load) for load in loads]
    every = [score(server, traffic, Ladder.explicit(range(1, server.times.largest + 1))).served for traffic in traffics]
    summed, best = _shares(every), None
    for number in range(ROUNDS if isinstance(given, Requests) else 1):
        steps = _scaled(summed)
        optima = best_ladders(steps, server.times.ns, most)
        ladder = Ladder(optima.ladder(most))
        served = [score(server, traffic, ladder).served for traffic in traffics]
        slower = sum(one.ms_a_step / exact.ms_a_step for one, exact in zip(served, every, strict=True))
        if best is None or slower < best[0]:
            best = slower, ladder, steps, optima, number
        summed = summed + _shares(served)
    assert best is not None
    _, ladder, steps, optima, number = best
    return Fitted(ladder, _prove(server, ladder, steps, optima, most), number)


def by_sizes(server: Server, given: Requests | Histogram, scored: Traffic, most: Sequence[int]) -> dict[int, float]:
    """ms a step of `scored` with a ladder of so many sizes, each fitted and simulated on its own."""
    return {
        size: score(server, scored, fit_ladder(server, given, size).ladder).served.ms_a_step
        for size in most
        if size <= server.times.largest
    }


def _shares(served: Sequence[Served]) -> np.ndarray:
    """Of all steps, those of so many rows; the mean over the loads."""
    return sum((one.steps / one.steps.sum() for one in served), np.zeros(len(served[0].steps))) / len(served)


def _scaled(shares: np.ndarray) -> Integers:
    """Every share that is not 0 keeps at least 1."""
    return np.ceil(shares / shares.sum() * WEIGHT).astype(np.int64)


def _prove(server: Server, ladder: Ladder, steps: Integers, optima: Optima, most: int) -> Proof:
    arcs = optima.prove(most)
    captured = [ladder.rung(rows) or 0 for rows in range(1, len(steps))]  # through the table that dispatch uses
    cost = int(steps[1:] @ server.times.ns[captured])
    total = int(steps.sum())
    return Proof(optima.cost(most) / total, cost / total, arcs, steps)
