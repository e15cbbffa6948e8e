"""Reads the traces that torch's profiler exports (Kineto, in Chrome's trace format).

Times are µs on the trace's own clock, which host and device share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.events import open_events

__all__ = ["Activity", "Call", "Span", "Trace", "TraceError", "parse_events", "read_trace"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LATEST = 1e18  # µs: 30,000 years
_WANTED = frozenset((*_ON_DEVICE, *_CALLS, "user_annotation", "overhead"))


@dataclass(frozen=True, slots=True)
class Activity:
    """Work on the device.

    kind: kernel, gpu_memcpy or gpu_memset. correlation: of the call that launched it; all that one launch of a graph
    runs share it. graph_node: the node that it is, where a graph ran it and the profiler says so.
    """

    name: str
    kind: str
    start: float
    stop: float
    device: int
    stream: int
    correlation: int
    graph_node: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA runtime or driver on the host."""

    name: str
    start: float
    stop: float
    thread: int
    correlation: int

    @property
    def is_graph(self) -> bool:
        """Whether it launches a graph."""
        return "GraphLaunch" in self.name


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of host time: an annotation, or overhead of the profiler or driver."""

    name: str
    start: float
    stop: float
    thread: int


@dataclass(frozen=True)
class Trace:
    """What a trace holds, each kind in order of its start. gpus: the devices' names, where it has them."""

    activities: tuple[Activity, ...]
    calls: tuple[Call, ...]
    annotations: tuple[Span, ...]
    overheads: tuple[Span, ...]
    gpus: Mapping[int, str] = field(default_factory=dict)


def read_trace(path: Path) -> Trace:
    """The trace in a JSON file, gzipped or not.

    Raises:
        TraceError: there is no such file, or it is no trace.
    """
    with open_events(path) as (head, events):
        try:
            return parse_events(events, _gpus(head))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{path}: an event is not as Kineto writes it: {error!r}") from None


def parse_events(events: Iterable[Mapping[str, Any]], gpus: Mapping[int, str] | None = None) -> Trace:
    """The events of a trace. Raises KeyError, ValueError and the like for one that lacks a field or holds another."""
    activities: list[Activity] = []
    calls: list[Call] = []
    annotations: list[Span] = []
    overheads: list[Span] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, args = event.get("cat"), event.get("args", {})
        if kind not in _WANTED:
            continue
        name, start = intern(str(event["name"])), float(event["ts"])
        stop = start + float(event.get("dur", 0))
        if not -_LATEST < start <= stop < _LATEST:
            raise ValueError(f"{name} lasts from {start} to {stop}")
        if kind in _ON_DEVICE:
            node = args.get("graph node id")
            activities.append(
                Activity(
                    name,
                    str(kind),
                    start,
                    stop,
                    int(args["device"]),
                    int(args["stream"]),
                    int(args["correlation"]),
                    int(node) if node else None,
                )
            )
        elif kind in _CALLS:
            calls.append(Call(name, start, stop, _number(event["tid"]), int(args.get("correlation", 0))))
        else:
            spans = annotations if kind == "user_annotation" else overheads
            spans.append(Span(name, start, stop, _number(event["tid"])))
    return Trace(
        tuple(sorted(activities, key=lambda a: a.start)),
        tuple(sorted(calls, key=lambda c: c.start)),
        tuple(sorted(annotations, key=lambda s: s.start)),
        tuple(sorted(overheads, key=lambda s: s.start)),
        gpus or {},
    )


def _number(thread: Any) -> int:
    """Kineto's own spans, such as its overhead, may run on a thread with a name."""
    return int(thread) if isinstance(thread, int) or str(thread).isdigit() else -1


def _gpus(head: Mapping[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    return {int(device["id"]): str(device["name"]) for device in devices} if isinstance(devices, list) else {}
