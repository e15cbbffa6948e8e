"""How long a step takes by the size it was captured for: a latency curve, read from a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.measure.stats import quantiles
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST

_MOST_MS = 3.6e6


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
    def between(cls, ms: dict[int, float], what: str, token_ns: float = 0.0) -> StepTimes:
        """From ms by size. Raises ConfigError: size 1 is missing, or a time is not positive."""
        sizes = sorted(ms)
        if not sizes or sizes[0] != 1 or sizes[-1] > LARGEST:
            raise ConfigError(f"latency curve: it must start at size 1, and end at {LARGEST} at the latest")
        if not all(0 < took < _MOST_MS for took in ms.values()):
            raise ConfigError("latency curve: its times must be positive, in ms, and below an hour")
        every = np.arange(sizes[-1] + 1)
        ns = np.rint(np.interp(every, sizes, [ms[size] for size in sizes]) * 1e6)
        if not (ns >= 1).all():
            raise ConfigError("latency curve: its times must be positive, in ms")
        if not 0 <= token_ns < math.inf:
            raise ConfigError(f"latency curve: token_ns is {token_ns}; it is a time in ns, from 0")
        ns[0] = 0
        return cls(ns.astype(np.int64), tuple(sizes), what, token_ns)


def load_step_times(path: Path | None = None) -> StepTimes:
    """A JSON file with `curve`: {"what": a sentence, "samples": {size: [ms, …]}, "token_ns": may be left out}; of the
    samples, the medians. By default the H200's for Llama-3-8B's shape, which comes with the package.

    Raises:
        ConfigError: the file cannot be read, or holds no such curve.
    """
    source = files("stepgraph.measure.ladder_fit").joinpath("curves/h200_llama_3_8b.json") if path is None else path
    try:
        found = json.loads(source.read_text(encoding="utf-8"))["curve"]
        medians = {
            int(size): quantiles([float(ms) for ms in taken])["median"] for size, taken in found["samples"].items()
        }
        what, token_ns = str(found["what"]), float(found.get("token_ns", 0.0))
    except OSError as error:
        raise ConfigError(f"latency curve: {source} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"latency curve: {source} holds none ({type(error).__name__}: {error})") from None
    return StepTimes.between(medians, what, token_ns)
