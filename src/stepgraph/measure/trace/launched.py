"""What an eager step gives the device, launch by launch, with the region and the operator that each comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import record_function

from stepgraph.measure.trace.kineto import Activity, TraceError, parse_events
from stepgraph.measure.trace.profiler import cuda_profiler
from stepgraph.runtime.regions import RegionLog, logging_regions

STEP, REGION = "stepgraph step", "stepgraph region "
"""Annotations around the step that is counted, and around each of its regions."""

_TYPES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@dataclass(frozen=True)
class Launch:
    """One kernel, copy or memset of an eager step.

    type, name, region: as `GraphNode` has them. operator: the outermost one of torch that called for it; "" where none
    did, as for a kernel of Triton's.
    """

    type: str
    name: str
    region: str
    operator: str


class TracedRegions(RegionLog):
    """Regions of an eager step, as annotations in the profiler's trace."""

    def __init__(self) -> None:
        super().__init__(lambda: ())
        self._names: list[str] = []
        self._open: list[Any] = []

    def enter(self, name: str) -> None:
        self._names.append(name)
        self._open.append(record_function(REGION + "/".join(self._names)))
        self._open[-1].__enter__()

    def leave(self, *, failed: bool) -> None:
        self._names.pop()
        self._open.pop().__exit__(None, None, None)


def trace_step(step: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[Launch]:
    """Run a step eagerly twice under torch's profiler; the launches of the second one. before: runs in front of each.

    Raises:
        TraceError: there is no CUDA device, or the profiler saw nothing there.
    """
    if not torch.cuda.is_available():
        raise TraceError("launches are traced on a CUDA device; there is none")
    with cuda_profiler(operators=True) as profiler:
        for name in ("warm-up", STEP):
            before()
            torch.cuda.synchronize()
            with record_function(name), logging_regions(TracedRegions()):
                step()
            torch.cuda.synchronize()
    return launches_of(exported_events(profiler))


def exported_events(profiler: Any) -> list[Mapping[str, Any]]:
    """The events that torch's profiler exports."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return events


def launches_of(events: Sequence[Mapping[str, Any]]) -> list[Launch]:
    """The launches inside the annotation STEP, in the order in which the host made them.

    Raises:
        TraceError: the annotation is missing, or nothing ran on the device in it.
    """
    trace = parse_events(list(events))
    steps = [span for span in trace.annotations if span.name == STEP]
    if not steps:
        raise TraceError(f"the trace has no annotation {STEP!r}")
    ran: dict[int, list[Activity]] = {}
    for activity in trace.activities:
        ran.setdefault(activity.correlation, []).append(activity)
    calls = [call for call in trace.calls if steps[0].start <= call.start < steps[0].stop and call.correlation in ran]
    if not calls:
        raise TraceError("the step ran nothing on the device; did the profiler record CUDA?")
    enclosing = {thread: _Enclosing(_spans(events, thread)) for thread in {call.thread for call in calls}}
    found = []
    for call in calls:
        region, operator = enclosing[call.thread].at(call.start)
        for activity in ran.pop(call.correlation, ()):  # once, should a runtime call and the driver's inside share it
            found.append(Launch(_TYPES[activity.kind], activity.name, region, operator))
    return found


class _Enclosing:
    """Asked for ever later moments: the innermost region and the outermost operator around each."""

    def __init__(self, spans: Iterator[tuple[float, float, str, bool]]) -> None:
        self._waiting = sorted(spans, key=lambda span: (-span[0], span[1]))  # taken from the end: outer ones first
        self._open: list[tuple[float, float, str, bool]] = []

    def at(self, moment: float) -> tuple[str, str]:
        while self._waiting and self._waiting[-1][0] <= moment:
            self._open.append(self._waiting.pop())
        self._open = [span for span in self._open if span[1] > moment]
        regions = [name for _, _, name, is_region in self._open if is_region]
        operators = [name for _, _, name, is_region in self._open if not is_region]
        return regions[-1] if regions else "", operators[0] if operators else ""


def _spans(events: Sequence[Mapping[str, Any]], thread: int) -> Iterator[tuple[float, float, str, bool]]:
    """(start, stop, name, whether it is a region) of a thread's regions and operators."""
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("user_annotation", "cpu_op") or event["tid"] != thread:
            continue
        name, start = str(event["name"]), float(event["ts"])
        stop = start + float(event.get("dur", 0))
        if event["cat"] == "cpu_op":
            yield start, stop, name, False
        elif name.startswith(REGION):
            yield start, stop, name.removeprefix(REGION), True
