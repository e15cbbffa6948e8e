"""Synthetic traces in the schema that Kineto writes."""

from __future__ import annotations

from typing import Any

_PID, _TID = 100, 100


def call(
    name: str, start: float, stop: float, correlation: int, *, cat: str = "cuda_runtime", tid: int = _TID
) -> dict[str, Any]:
    args = {"External id": 1, "cbid": 211, "correlation": correlation}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": _PID,
        "tid": tid,
        "ts": start,
        "dur": stop - start,
        "args": args,
    }


def kernel(
    name: str, start: float, stop: float, correlation: int, *, node: int = 0, stream: int = 7, cat: str = "kernel"
) -> dict[str, Any]:
    args = {
        "External id": 1, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": correlation,
        "registers per thread": 32, "grid": [132, 1, 1], "block": [128, 1, 1], "graph id": 3 if node else 0,
        "graph node id": node,
    }  # fmt: skip
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": stop - start,
        "args": args,
    }


def other(cat: str, name: str, start: float, stop: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": _PID, "tid": _TID, "ts": start, "dur": stop - start, "args": {}}


def syncs(count: int, start: float) -> list[dict[str, Any]]:
    """1 µs each, a µs between."""
    return [call("cudaDeviceSynchronize", start + 2 * i, start + 2 * i + 1, 0) for i in range(count)]


def flow(start: float, correlation: int) -> list[dict[str, Any]]:
    """The arrow from a call to its activity, and other events that are no work."""
    arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": _PID, "tid": _TID, "ts": start}
    return [
        {"ph": "s", **arrow},
        {"ph": "f", "bp": "e", **arrow},
        {"ph": "M", "name": "process_name", "ts": start, "pid": _PID, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": start},
    ]


def eager_step(at: float, correlation: int, *, stall: float = 0.0, host_gap: float = 0.0) -> list[dict[str, Any]]:
    """Three syncs; a step of three launches; two syncs. 300 µs.

    From the begin at `at`: events at 0, first launch at 5, kernels of 10 from 15 on. stall: µs before the first launch.
    host_gap: µs that the host pauses before the third launch.
    """
    at3, c = at + stall, correlation
    late = at3 + host_gap
    return [
        *syncs(3, at - 6),
        call("cudaEventRecord", at, at + 1, c),
        call("cudaGetDevice", at + 1, at + 1.1, c + 1),
        call("cudaLaunchKernel", at3 + 5, at3 + 8, c + 2),
        *flow(at3 + 5, c + 2),
        kernel("first", at3 + 15, at3 + 25, c + 2),
        call("cuLaunchKernelEx", at3 + 10, at3 + 13, c + 3, cat="cuda_driver"),
        kernel("second", at3 + 26, at3 + 36, c + 3),
        call("cudaMemcpyAsync", late + 40, late + 43, c + 4),
        kernel("Memcpy DtoD", late + 46, late + 56, c + 4, cat="gpu_memcpy"),
        call("cudaEventRecord", late + 45, late + 46, c + 5),
        *syncs(2, late + 60),
    ]


def graph_step(at: float, correlation: int, *, idle: float = 0.0) -> list[dict[str, Any]]:
    """The same with one launch of a graph of three nodes, of which the last two overlap by 2 µs.

    idle: µs that the device waits inside the graph, before the second node.
    """
    c, late = correlation, at + idle
    return [
        *syncs(3, at - 6),
        call("cudaEventRecord", at, at + 1, c),
        call("cudaGraphLaunch", at + 4, at + 12, c + 1),
        kernel("first", at + 14, at + 24, c + 1, node=1),
        kernel("second", late + 25, late + 35, c + 1, node=2),
        kernel("third", late + 33, late + 43, c + 1, node=3, stream=8),
        call("cudaEventRecord", at + 13, at + 14, c + 2),
        *syncs(2, late + 46),
    ]
