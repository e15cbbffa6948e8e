"""How long a step takes by the size it was captured for: a latency curve, with every size on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from stepgraph.measure.curve import LatencyCurve, load_curve
from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.runtime.errors import ConfigError


@dataclass(frozen=True)
class StepTimes:
    """ns: of a decode step captured for so many rows, from 0 (which takes none) to the largest. measured: sizes, the
    others lie on straight lines between them. what: names the step. token_ns: that a token of a real row's context
    adds, for times that have no context in them.
    """

    ns: Integers
    measured: tuple[int, ...]
    what: str
    token_ns: float = 0.0

    @property
    def largest(self) -> int:
        return len(self.ns) - 1

    def upto(self, rows: int) -> StepTimes:
        """Raises ConfigError: the curve does not reach so far, or there are no rows."""
        if not 1 <= rows <= self.largest:
            raise ConfigError(f"max rows: {rows} is not between 1 and {self.largest}, where the latency curve ends")
        return replace(self, ns=self.ns[: rows + 1], measured=tuple(size for size in self.measured if size <= rows))

    @classmethod
    def of(cls, curve: LatencyCurve) -> StepTimes:
        """The medians. Raises ConfigError: size 1 is missing."""
        sizes = curve.sizes
        if sizes[0] != 1:
            raise ConfigError(f"latency curve: it starts at size {sizes[0]}; it must start at size 1")
        every = np.arange(sizes[-1] + 1)
        ns = np.rint(np.interp(every, sizes, [curve.medians[size] for size in sizes]) * 1e6)
        ns[0] = 0
        return cls(ns.astype(np.int64), tuple(sizes), curve.what, curve.token_ns)


def load_step_times(path: Path | None = None) -> StepTimes:
    """From a file that `load_curve` reads; by default the H200's for Llama-3-8B's shape, which comes with the package.

    Raises:
        ConfigError: the file cannot be read, or holds no such curve.
    """
    source = files("stepgraph.measure.ladder_fit").joinpath("curves/h200_llama_3_8b.json") if path is None else path
    return StepTimes.of(load_curve(source))
