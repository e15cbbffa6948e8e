"""Cuts a trace into steps: what the host called for each, and what the device did of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Activity, Call, Trace

SYNCS_BEFORE, SYNCS_AFTER = 3, 2
"""Synchronisations of the device in a row that begin and end a step: no step makes so many, and unlike an annotation
they are in the trace where the profiler leaves the host's operators alone, which would slow an eager step down."""

_SYNC = "cudaDeviceSynchronize"
_ANNOTATED = "ProfilerStep#"  # torch.profiler's step()
_NO_WORK = re.compile("Get|Set(Device|Current)|Query|IsCapturing|PrimaryCtx")  # may stand between two of the above


@dataclass(frozen=True)
class StepTrace:
    """One step.

    begin: of its first call on the host, or of its annotation. calls: on the host meanwhile, in order.
    activities: what these calls had the device do, in order; at least one. overhead: µs that the profiler or the driver
    say they spent on their own while it ran, by name.
    """

    begin: float
    calls: tuple[Call, ...]
    activities: tuple[Activity, ...]
    overhead: dict[str, float]

    @property
    def end(self) -> float:
        """Of the last activity."""
        return max(activity.stop for activity in self.activities)


def split_steps(trace: Trace) -> list[StepTrace]:
    """The steps between marks (`SYNCS_BEFORE`), or else those that torch.profiler's step() annotated.

    Raises:
        TraceError: none is found, one that ran nothing on the device, or one that ran on several devices.
    """
    windows = list(between_marks(trace)) or list(_annotated(trace))
    if not windows:
        raise TraceError(
            f"no steps: neither {SYNCS_BEFORE} calls of {_SYNC} in a row in front of one nor {_ANNOTATED} annotations; "
            "`stepgraph trace FILE` finds the steps of any program"
        )
    by_call: dict[int, list[Activity]] = {}
    for activity in trace.activities:
        by_call.setdefault(activity.correlation, []).append(activity)
    steps: list[StepTrace] = []
    for begin, until, calls in windows:
        correlations = {call.correlation for call in calls} - {0}  # where calls are nested, they may share one
        launched = [activity for correlation in correlations for activity in by_call.get(correlation, ())]
        if not launched:
            raise TraceError(f"step {len(steps)} ran nothing on the device; did the profiler record CUDA?")
        if len({activity.device for activity in launched}) > 1:
            raise TraceError(f"step {len(steps)} ran on several devices; trace one")
        overhead: dict[str, float] = {}
        for span in trace.overheads:
            if begin <= span.start < until:
                overhead[span.name] = overhead.get(span.name, 0.0) + span.stop - span.start
        steps.append(StepTrace(begin, calls, tuple(sorted(launched, key=lambda a: a.start)), overhead))
    return steps


def between_marks(trace: Trace) -> Iterator[tuple[float, float, tuple[Call, ...]]]:
    """(begin, until, calls) of each step that stands between marks."""
    threads = {call.thread for call in trace.calls if call.name == _SYNC}
    for thread in sorted(threads):
        run, inside, is_open = 0, list[Call](), False
        for call in trace.calls:
            if call.thread != thread or _NO_WORK.search(call.name):
                continue
            if call.name != _SYNC:
                run = 0
                inside.append(call)
                continue
            run += 1
            if run == SYNCS_AFTER and is_open:
                if inside:
                    yield inside[0].start, call.stop, tuple(inside)
                is_open = False
            if run == SYNCS_BEFORE:
                is_open = True
            if run >= SYNCS_AFTER:
                inside = []


def _annotated(trace: Trace) -> Iterator[tuple[float, float, tuple[Call, ...]]]:
    for span in trace.annotations:
        if span.name.startswith(_ANNOTATED):
            calls = tuple(call for call in trace.calls if span.start <= call.start < span.stop)
            yield span.start, span.stop, calls
