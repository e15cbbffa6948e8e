"""The latency curve: how long a decode step takes by its number of rows."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.measure.clock import device_ms, host_us
from stepgraph.measure.result import Result, Rows
from stepgraph.measure.stats import quantiles
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST

if TYPE_CHECKING:  # who reads a curve needs no engine
    from stepgraph.measure.decode import DecodeRows
    from stepgraph.runtime.runner import GraphRunner

STEPS = 5
"""Of a size in one round."""

ON_THE_DEVICE = "device time, from an event before the step to one behind it"
ON_THE_HOST = "host time: without a GPU the host computes the step, and the tape stands for a graph"
_LEAST_MS, _MOST_MS = 1e-6, 3.6e6  # of a step: a nanosecond, an hour


@dataclass(frozen=True)
class LatencyCurve:
    """samples: ms of a step for each size that was measured. what: names the step. token_ns: that a token of a real
    row's context adds, for samples that have no context in them.
    """

    samples: Mapping[int, Sequence[float]]
    what: str
    token_ns: float = 0.0

    @cached_property
    def sizes(self) -> list[int]:
        return sorted(self.samples)

    @cached_property
    def medians(self) -> dict[int, float]:
        return {size: quantiles(self.samples[size])["median"] for size in self.sizes}

    def ms(self, rows: int) -> float | None:
        """The median at a size; between two measured ones on the straight line. None outside of what was measured."""
        if rows in self.medians:
            return self.medians[rows]
        place = bisect_left(self.sizes, rows)
        if place == 0 or place == len(self.sizes):
            return None
        low, high = self.sizes[place - 1], self.sizes[place]
        share = (rows - low) / (high - low)
        return self.medians[low] * (1 - share) + self.medians[high] * share

    def to_json(self) -> dict[str, Any]:
        samples = {str(size): list(self.samples[size]) for size in self.sizes}
        return {"what": self.what, "samples": samples, **({"token_ns": self.token_ns} if self.token_ns else {})}


def load_curve(path: Path | Traversable) -> LatencyCurve:
    """A curve that `stepgraph padding --json` printed, or a benchmark wrote: a JSON file with `curve`,
    {"what": a sentence, "samples": {size: [ms, …]}, "token_ns": may be left out}.

    Raises:
        ConfigError: the file cannot be read, or holds none; or its sizes or times cannot be.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["curve"]
        samples = {int(size): [float(ms) for ms in taken] for size, taken in found["samples"].items()}
        if not samples or not all(samples.values()):
            raise ValueError("no samples")
        curve = LatencyCurve(samples, str(found["what"]), float(found.get("token_ns", 0.0)))
    except OSError as error:
        raise ConfigError(f"curve: {path} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"curve: {path} holds no latency curve ({type(error).__name__}: {error}); "
            f"`stepgraph padding --json` prints one"
        ) from None
    if curve.sizes[0] < 1 or curve.sizes[-1] > LARGEST:
        raise ConfigError(f"curve: {path}: its sizes must lie between 1 and {LARGEST}")
    if not all(_LEAST_MS <= ms < _MOST_MS for taken in samples.values() for ms in taken):
        raise ConfigError(f"curve: {path}: its times must be positive, in ms, and below an hour")
    if not 0 <= curve.token_ns < math.inf:
        raise ConfigError(f"curve: {path}: token_ns is {curve.token_ns}; it is a time in ns, from 0")
    return curve


def step_ms(decode: DecodeRows, count: int, runner: GraphRunner | None = None) -> list[float]:
    """ms of each of `count` steps of the rows that are staged: of the device, of the host where there is none."""

    def step() -> None:
        decode.step(runner)

    if decode.buffers.device.type == "cuda":
        return device_ms(step, count, before=decode.rewind)
    return [us / 1e3 for us in host_us(step, count, before=decode.rewind, warm=1)]


@torch.inference_mode()
def measure_curve(
    decode: DecodeRows, sizes: Sequence[int], what: str, *, rounds: int, steps: int = STEPS
) -> LatencyCurve:
    """sizes: in rows; each should have a graph of its own. what: names the step.

    Rounds, of so many steps a size, go through the sizes upwards and downwards in turn, so that a drift of the machine
    meets all alike.
    """
    samples: dict[int, list[float]] = {size: [] for size in sorted(sizes)}
    for turn in range(rounds):
        for size in list(samples) if turn % 2 == 0 else list(samples)[::-1]:
            decode.stage(size)
            samples[size] += step_ms(decode, steps)
    return LatencyCurve(samples, what)


def curve_table(curve: LatencyCurve) -> Rows:
    """One row a size."""
    rows = []
    for size in curve.sizes:
        found = quantiles(curve.samples[size])
        rows.append([size, found["median"], found["p10"], found["p90"], found["median"] / size * 1e3])
    definitions = {
        "rows": "requests that decode, each in a graph of exactly that size",
        "median": f"ms of a step; {curve.what}",
        "µs a row": "the median over the rows",
    }
    return Rows("latency curve", ["rows", "median", "p10", "p90", "µs a row"], rows, definitions)


def curve_result(curve: LatencyCurve) -> Result:
    """The curve on its own."""
    return Result(
        name="curve",
        definition=f"Time of a decode step by its number of rows, one process: {curve.what}.",
        tables=[curve_table(curve)],
        more={"curve": curve.to_json()},
    )
