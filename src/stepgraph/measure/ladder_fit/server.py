"""A server as the fit sees it: how long its steps take with a ladder, and what it then does with traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepgraph.measure.ladder_fit.histogram import Histogram
from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.simulate import Prefill, Served, simulate
from stepgraph.measure.ladder_fit.step_times import StepTimes
from stepgraph.runtime.ladder import Ladder

Traffic = Callable[[Integers], Served]
"""What a server does, given how long a step of so many rows takes."""


@dataclass(frozen=True)
class Server:
    """times: by captured size. row_ns: what the context of each real row adds, where `times` has none in it."""

    times: StepTimes
    row_ns: int = 0
    prefill: Prefill | None = None

    def step_ns(self, ladder: Ladder) -> Integers:
        """By number of rows, padded as the ladder pads them; its last size is the most rows there are."""
        captured = _captured(ladder)
        return self.times.ns[captured] + self.row_ns * np.arange(len(captured))

    def traffic(self, given: Requests | Histogram) -> Traffic:
        """A histogram stays as it is however long steps take; requests are simulated anew."""
        if isinstance(given, Requests):
            return lambda step_ns: simulate(given, step_ns, self.prefill)
        counts = given.counts(self.times.largest)
        return lambda step_ns: Served(counts, step_ns)


@dataclass(frozen=True)
class Score:
    """A ladder and what the server did with it. rows: real and computed ones, over all steps."""

    ladder: Ladder
    served: Served

    @property
    def padded_share(self) -> float:
        """Rows computed for no request over those computed for one."""
        captured, rows = _captured(self.ladder), np.arange(len(self.served.steps))
        return float(self.served.steps @ captured) / float(self.served.steps @ rows) - 1

    @property
    def used(self) -> int:
        """Sizes that any step took."""
        return len(np.unique(_captured(self.ladder)[self.served.steps > 0]))


def score(server: Server, traffic: Traffic, ladder: Ladder) -> Score:
    return Score(ladder, traffic(server.step_ns(ladder)))


def _captured(ladder: Ladder) -> Integers:
    """The size that so many rows are padded to, from 0."""
    sizes = np.array((0, *ladder.sizes))
    return sizes[np.searchsorted(sizes, np.arange(ladder.max_size + 1))]
