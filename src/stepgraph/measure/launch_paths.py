"""What one launch costs, by who launches: the driver, Triton, torch; by the host's clock and by a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stepgraph.measure.clock import host_us
from stepgraph.measure.null_kernel import empty_call, null_launcher
from stepgraph.measure.result import Figure
from stepgraph.measure.trace.kineto import Trace, TraceError
from stepgraph.measure.trace.profiler import cuda_profiler, profiled_trace

LAUNCHES, TURNS, WARM = 300, 10, 20
CALL_TO_START, HOST, DURATION = "call to start", "host time of the call", "kernel's duration"
DRIVER = "driver"

_START_IS = (
    "From the start of the launching call to the start of its kernel, the device idle before; from a trace of "
    "torch.profiler with CUDA activities alone."
)
_HOST_IS = (
    "By the host's clock around the whole call from Python, without a profiler, the device idle before; the paths in "
    "turns."
)
_DURATION_IS = "From start to end of the kernel, in the same trace as the launches."


@dataclass(frozen=True)
class LaunchPath:
    """One way to launch a kernel. what: which kernel, and through what."""

    name: str
    what: str
    launch: Callable[[], object]


@dataclass(frozen=True)
class TracedLaunches:
    """Of every launch in a trace, µs from the call to the kernel's start, and µs that the kernel ran."""

    to_start: tuple[float, ...]
    duration: tuple[float, ...]


def launch_paths() -> list[LaunchPath]:
    """Those that this machine has. All launch on the current stream."""
    paths = [
        LaunchPath(DRIVER, "An empty kernel through cuLaunchKernelEx and ctypes", null_launcher(_raw_stream())),
        LaunchPath("torch", "A kernel of one thread that reads the clock (_sleep)", lambda: torch.cuda._sleep(0)),
        LaunchPath("torch operator", "The operator neg_ of one element", torch.zeros(1, device="cuda").neg_),
    ]
    try:
        from stepgraph.measure.kernels import nothing
    except ImportError:
        return paths
    launch, blocks = nothing, torch.cuda.get_device_properties().multi_processor_count
    paths.insert(1, LaunchPath("Triton", "An empty kernel", lambda: launch[(blocks,)]()))
    return paths


def launch_figures(paths: Sequence[LaunchPath]) -> list[Figure]:
    """By path both definitions of a launch, and the kernel's duration.

    Raises:
        TraceError: the profiler did not record the launches.
    """
    hosts: dict[str, list[float]] = {path.name: [] for path in paths}
    for turn in range(TURNS):  # so that a drift of the machine meets all alike
        for path in paths if turn % 2 == 0 else paths[::-1]:
            hosts[path.name] += host_us(path.launch, LAUNCHES // TURNS)
    figures = []
    for path in paths:
        traced = trace_launches(path.launch)
        for name, definition, samples in (
            (CALL_TO_START, _START_IS, traced.to_start),
            (HOST, _HOST_IS, hosts[path.name]),
            (DURATION, _DURATION_IS, traced.duration),
        ):
            figures.append(Figure(f"{path.name}: {name}", "µs", f"{path.what}. {definition}", samples))
    ctypes_is = f"By the host's clock: cuDriverGetVersion through ctypes, which is part of `{DRIVER}: {HOST}`."
    figures.append(Figure("an empty call through ctypes", "µs", ctypes_is, host_us(empty_call, LAUNCHES, warm=WARM)))
    return figures


def trace_launches(launch: Callable[[], object]) -> TracedLaunches:
    """`LAUNCHES` launches under the profiler, the device idle before each."""
    with cuda_profiler() as profiler:
        for _ in range(WARM + LAUNCHES):
            torch.cuda.synchronize()
            launch()
        torch.cuda.synchronize()
    found = launches_of(profiled_trace(profiler))
    if len(found.to_start) < LAUNCHES:
        raise TraceError(f"the profiler recorded {len(found.to_start)} of {WARM + LAUNCHES} launches")
    return TracedLaunches(found.to_start[-LAUNCHES:], found.duration[-LAUNCHES:])


def launches_of(trace: Trace) -> TracedLaunches:
    """Every kernel whose launching call is in the trace; where calls are nested, the outermost."""
    called: dict[int, float] = {}
    for call in trace.calls:
        called.setdefault(call.correlation, call.start)  # they come in order of their start
    kernels = [a for a in trace.activities if a.kind == "kernel" and a.correlation in called]
    return TracedLaunches(
        tuple(kernel.start - called[kernel.correlation] for kernel in kernels),
        tuple(kernel.stop - kernel.start for kernel in kernels),
    )


def _raw_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
