"""Joins calls on the host to what they had a device do, and picks one device of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Activity, Call, Trace

_COPIES = ("cudaMemcpy", "cuMemcpy", "hipMemcpy")


@dataclass(frozen=True, slots=True)
class Launch:
    """A call and its activities in order of their start, at least one: many for a graph."""

    call: Call
    activities: tuple[Activity, ...]

    @property
    def is_graph(self) -> bool:
        return self.call.is_graph

    @property
    def to_host(self) -> bool:
        return any(activity.kind == "gpu_memcpy" and "DtoH" in activity.name for activity in self.activities)


def join(trace: Trace) -> list[Launch]:
    """All launches in order. Where calls are nested and share a correlation, the outermost is the launch."""
    ran = {key: tuple(group) for key, group in groupby(sorted(trace.activities, key=_launched_by), _launched_by)}
    found = []
    for call in trace.calls:
        activities = ran.pop(call.correlation, None) if call.correlation else None
        if activities:
            found.append(Launch(call, activities))
    return found


def _launched_by(activity: Activity) -> int:
    return activity.correlation


def waits(trace: Trace, launches: Sequence[Launch]) -> list[Call]:
    """Calls in which the host waits for the device, in order: by their names, or copies back that return when done."""
    copies = {one.call.correlation: one.activities[-1].stop for one in launches if one.to_host}
    return [
        call
        for call in trace.calls
        if "Synchronize" in call.name
        or (call.name.startswith(_COPIES) and "Async" not in call.name)
        or call.stop >= copies.get(call.correlation, inf)
    ]


def on_gpu(trace: Trace, gpu: int | None) -> tuple[Trace, int]:
    """What one device did, with the calls and annotations of the threads that launched it; and which device that is.

    gpu: by default the busiest.

    Raises:
        TraceError: nothing ran on that device, or no call in the trace launched what did.
    """
    busy = busy_time(trace)
    chosen = max(busy, key=lambda device: busy[device]) if gpu is None else gpu
    if chosen not in busy:
        raise TraceError(f"nothing ran on GPU {chosen}; the trace has GPU {', '.join(map(str, sorted(busy)))}")
    activities = tuple(activity for activity in trace.activities if activity.device == chosen)
    mine = {activity.correlation for activity in activities} - {0}
    threads = {call.thread for call in trace.calls if call.correlation in mine}
    if not threads:
        raise TraceError(f"no call in the trace launched what GPU {chosen} did; begin the recording before the program")
    return (
        replace(
            trace,
            activities=activities,
            calls=tuple(call for call in trace.calls if call.thread in threads),
            annotations=tuple(span for span in trace.annotations if span.thread in threads),
            overheads=tuple(span for span in trace.overheads if len(busy) == 1 or span.thread in threads),
        ),
        chosen,
    )


def busy_time(trace: Trace) -> Mapping[int, float]:
    """µs of all activities, added up, by device."""
    busy: dict[int, float] = {}
    for activity in trace.activities:
        busy[activity.device] = busy.get(activity.device, 0.0) + activity.stop - activity.start
    return busy
