"""One step, timed by events and by a profiler's trace.

All ways to run a step are measured at the same boundary: the device idle, the host about to begin; until the device
has done the last of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.measure.stats import in_turns
from stepgraph.measure.trace.dilation import without_profiler
from stepgraph.measure.trace.kineto import TraceError
from stepgraph.measure.trace.profiler import cuda_profiler, profiled_trace
from stepgraph.measure.trace.steps import SYNCS_AFTER, SYNCS_BEFORE, split_steps
from stepgraph.measure.trace.waterfall import StepWaterfall, lasting_gaps, waterfall
from stepgraph.measure.verdict import Parts, Verdict, verdict
from stepgraph.measure.work import Floor
from stepgraph.runtime.errors import ConfigError

WARM = 3
"""Steps that are left out: the first ones under a profiler load what it needs."""

Run = Callable[[], object]


@dataclass(frozen=True)
class Way:
    """A way to run a step. step: begins it and need not wait. before: puts back what it changed, outside of it."""

    name: str
    step: Run
    before: Run


@dataclass(frozen=True)
class Accounted:
    """What was found of one way.

    steps: traced; where there is `plain`, without what the profiler added (`without_profiler`), so that the verdict
    does not rest on it. profiled: µs by events of the same steps. plain: µs by events without a profiler, () where only
    a trace is there.
    """

    name: str
    steps: Sequence[StepWaterfall]
    profiled: Sequence[float] = ()
    plain: Sequence[float] = ()

    def median(self, part: str) -> float:
        """Of one of `StepWaterfall`'s parts."""
        return float(statistics.median(getattr(step, part) for step in self.steps))

    def parts(self, floor: Floor | None) -> Parts:
        return Parts(
            total=self.median("total"),
            before_first=self.median("before_first"),
            busy=self.median("busy"),
            gaps_host=self.median("gaps_host"),
            gaps_device=self.median("gaps_device"),
            submitted=self.median("submitted"),
            launches=int(self.median("launches")),
            activities=int(self.median("activities")),
            gaps=lasting_gaps(self.steps),
            floor=floor,
        )

    def verdict(self, floor: Floor | None) -> Verdict:
        return verdict(self.parts(floor))

    @property
    def residual(self) -> float | None:
        """µs that events see and the waterfall's rows, each a median, do not add up to; None without events."""
        if not self.profiled:
            return None
        rows = ("before_first", "busy", "gaps_device", "gaps_host", "profiler")
        return statistics.median(self.profiled) - sum(self.median(row) for row in rows)


def account(ways: Sequence[Way], count: int) -> list[Accounted]:
    """Measure each way `count` times without a profiler, two ways in turns, and then all with one.

    Of several accounts in a process only the first one's plain times are what they are without a profiler: see
    `cuda_profiler`.

    Raises:
        ConfigError: there is no CUDA device.
        TraceError: the profiler did not record the steps.
    """
    if not torch.cuda.is_available():
        raise ConfigError("account: a timeline needs a CUDA device; there is none")
    plain: list[Sequence[float]]
    for way in ways:
        events_us(way, WARM)
    if len(ways) == 2:
        a, b = ways
        pairs = in_turns(count, lambda: events_us(a, 1)[0], lambda: events_us(b, 1)[0])
        plain = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
    else:
        plain = [events_us(way, count) for way in ways]
    found = []
    for way, without in zip(ways, plain, strict=True):
        steps, profiled = trace_steps(way, count)
        added = statistics.median(profiled) - statistics.median(without)
        found.append(Accounted(way.name, without_profiler(steps, added), profiled, without))
    return found


def events_us(way: Way, count: int, profiler: Any = None) -> list[float]:
    """Microseconds of each step, from an event that an idle device takes when the host begins to one behind the step.

    profiler: not started yet; it finds the marks between the steps that `split_steps` looks for.
    """
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    with profiler or nullcontext():
        for start, stop in spans:
            way.before()
            for _ in range(SYNCS_BEFORE):
                torch.cuda.synchronize()
            start.record()
            way.step()
            stop.record()
            for _ in range(SYNCS_AFTER):
                torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in spans]


def trace_steps(way: Way, count: int) -> tuple[list[StepWaterfall], list[float]]:
    """`count` steps under the profiler, and what `events_us` gives for the same ones.

    The profiler records CUDA alone: the host's operators would make an eager step slower by far more.

    Raises:
        TraceError: it did not record all steps.
    """
    profiler = cuda_profiler()
    events = events_us(way, WARM + count, profiler)
    steps = [waterfall(step) for step in split_steps(profiled_trace(profiler))]
    if len(steps) != WARM + count:
        raise TraceError(f"{way.name}: the profiler's trace holds {len(steps)} of {WARM + count} steps")
    return steps[WARM:], events[WARM:]
