"""The capture session: largest size first, warmed up, in one pool, and no size brings the others down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.ladder import Ladder
from stepgraph.runtime.platforms import Platform, Recording

Progress = Callable[[int, int, str], None]
"""Called with (sizes done, sizes in all, what comes next); a front end draws it."""

CapturedStep = Callable[[BatchDescriptor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class CapturedGraph:
    """One recorded size and where its outputs lie."""

    key: BatchDescriptor
    recording: Recording
    outputs: dict[str, torch.Tensor]
    seconds: float


@dataclass(frozen=True)
class CaptureReport:
    """What a session captured, what it dropped and why, and how long it took in seconds."""

    graphs: dict[BatchDescriptor, CapturedGraph] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def capture_ladder(
    platform: Platform, ladder: Ladder, step: CapturedStep, *, warmups: int, progress: Progress | None = None
) -> CaptureReport:
    """Record `step` at each rung, the largest first, so that smaller sizes reuse what it took from the pool.

    A size that fails is dropped with its reason and the others stay.

    Raises:
        CaptureError: not one size could be captured; says why, and for memory what to lower.
    """
    started = time.perf_counter()
    graphs: dict[BatchDescriptor, CapturedGraph] = {}
    dropped: dict[int, str] = {}
    pool = platform.new_pool()
    sizes = sorted(ladder.sizes, reverse=True)
    with _collector_frozen():
        for done, size in enumerate(sizes):
            if progress is not None:
                progress(done, len(sizes), f"size {size}")
            key = BatchDescriptor.decode(size)
            try:
                graphs[key] = _capture_one(platform, key, step, pool, warmups)
            except (torch.OutOfMemoryError, CaptureError) as error:
                dropped[size] = _why(error, size, sizes)
                pool = platform.new_pool()  # a failed capture spends its pool
    if progress is not None:
        progress(len(sizes), len(sizes), "captured")
    if not graphs:
        raise CaptureError(f"no size of the ladder could be captured; size {sizes[-1]}: {dropped[sizes[-1]]}")
    platform.synchronize()
    return CaptureReport(graphs, dropped, time.perf_counter() - started)


def _capture_one(
    platform: Platform, key: BatchDescriptor, step: CapturedStep, pool: Any, warmups: int
) -> CapturedGraph:
    started = time.perf_counter()
    for _ in range(warmups):
        platform.warm_up(lambda: step(key))
    recording, outputs = platform.record(lambda: step(key), pool)
    return CapturedGraph(key, recording, outputs, time.perf_counter() - started)


def _why(error: Exception, size: int, sizes: list[int]) -> str:
    """Why a size was dropped, and for memory what to lower."""
    if not isinstance(error, torch.OutOfMemoryError):
        return str(error)
    smaller = [s for s in sizes if s < size]
    ladder = f"end the ladder at {smaller[0]}" if smaller else "use a smaller batch"
    return f"out of memory while capturing size {size}; {ladder}, or give the KV cache less memory (fewer blocks)"


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """No garbage collection while recording: it is slow there, and could free a graph in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()
