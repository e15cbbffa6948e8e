"""torch's profiler, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity

from stepgraph.measure.trace.kineto import Trace, read_trace


def cuda_profiler(*, operators: bool = False) -> torch.profiler.profile:
    """A profiler of CUDA's activities, not started. operators: torch's own too, which makes an eager step slower.

    Once it has run, Kineto stays hooked into the driver, and every later launch of a graph in the process costs the
    host 0.2 to 0.4 µs a node (on an H200 63 to 115 µs for 330 nodes, 3 before). So whatever is timed without a profiler
    is timed before the first one. Told to let go (TEARDOWN_CUPTI), Kineto loses the launches of the next trace.
    """
    activities = [ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=[ProfilerActivity.CPU, *activities] if operators else activities)


def profiled_trace(profiler: torch.profiler.profile) -> Trace:
    """What a profiler that has stopped recorded. Raises TraceError as `read_trace`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
