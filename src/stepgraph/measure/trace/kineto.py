"""Reads the traces that torch's profiler exports (Kineto, in Chrome's trace format).

Times are µs on the trace's own clock, which host and device share.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.runtime.errors import StepgraphError

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


class TraceError(StepgraphError):
    """A trace that cannot be read, or that does not hold what is looked for."""


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


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of host time: an annotation, or overhead of the profiler or driver."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Trace:
    """What a trace holds, each kind in order of its start."""

    activities: tuple[Activity, ...]
    calls: tuple[Call, ...]
    annotations: tuple[Span, ...]
    overheads: tuple[Span, ...]


def read_trace(path: Path) -> Trace:
    """The trace in a JSON file, gzipped where it ends in .gz.

    Raises:
        TraceError: there is no such file, or it is no trace.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(raw)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise TraceError(f"{path}: no JSON: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise TraceError(f"{path}: no traceEvents in it; torch.profiler's export_chrome_trace writes them")
    try:
        return parse_events(events)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: an event is not as Kineto writes it: {error!r}") from None


def parse_events(events: list[Mapping[str, Any]]) -> Trace:
    """The events of a trace. Raises KeyError and the like for one that lacks a field or holds another."""
    activities, calls, annotations, overheads = [], [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, args = event.get("cat"), event.get("args", {})
        name, start = str(event["name"]), float(event["ts"])
        stop = start + float(event.get("dur", 0))
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
            calls.append(Call(name, start, stop, int(event["tid"]), int(args.get("correlation", 0))))
        elif kind == "user_annotation":
            annotations.append(Span(name, start, stop))
        elif kind == "overhead":
            overheads.append(Span(name, start, stop))
    return Trace(
        tuple(sorted(activities, key=lambda a: a.start)),
        tuple(sorted(calls, key=lambda c: c.start)),
        tuple(sorted(annotations, key=lambda s: s.start)),
        tuple(sorted(overheads, key=lambda s: s.start)),
    )
