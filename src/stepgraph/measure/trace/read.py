"""Reads a trace of either kind, told apart by what the file begins with."""

from __future__ import annotations

from pathlib import Path

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Trace, read_trace
from stepgraph.measure.trace.nsight import read_nsight

_SQLITE = b"SQLite format 3\0"


def read_any(path: Path) -> Trace:
    """A trace of torch's profiler, or of Nsight Systems as SQLite, in which something ran on a device.

    Raises:
        TraceError: the file cannot be read, is of another kind, or is of the host alone.
    """
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: export it first: nsys export --type sqlite {path}")
    try:
        with path.open("rb") as file:
            begins = file.read(len(_SQLITE))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if not begins:
        raise TraceError(f"{path}: the file is empty")
    trace = read_nsight(path) if begins == _SQLITE else read_trace(path)
    if not trace.activities:
        raise TraceError(f"{path}: nothing ran on a device in it; have the profiler record CUDA too")
    if not trace.calls:
        raise TraceError(f"{path}: no calls of CUDA in it, so that nothing says what was launched when")
    return trace
