"""CUDA graphs through torch."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch

from stepgraph.runtime.breakable import BreakableRecording
from stepgraph.runtime.capture_guard import refuse_capture_while_serving
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.base import DeviceMemory
from stepgraph.runtime.platforms.cuda_memory import cached_bytes, device_memory, let_go_of, pool_segments
from stepgraph.runtime.platforms.cuda_pinned import CudaMark, PinnedRing, shared_memory, uploaded
from stepgraph.runtime.platforms.cuda_segments import CudaRecording, CudaSegments
from stepgraph.runtime.platforms.cuda_streams import capture_stream
from stepgraph.runtime.platforms.segments import record_segments, record_whole
from stepgraph.runtime.regions import logging_regions

T = TypeVar("T")

_STREAMS_OF_A_PRIORITY = 32  # torch's kStreamsPerPool
_CYCLES_A_SECOND = 2.0e9  # of the device's clock; more than an H200 reaches


def why_unavailable() -> str | None:
    """Why CUDA does not work here, or None where it does."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (driver missing, or no GPU in this machine)"
    return None


def cuda_platform(device: torch.device) -> CudaPlatform:
    """The one platform of a device, which knows of all its recordings and spent pools.

    Raises:
        ConfigError: no usable CUDA device.
    """
    reason = why_unavailable()
    if reason is not None:
        raise ConfigError(f"device {device}: {reason}; use --device cpu")
    return _platform(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _platform(index: int) -> CudaPlatform:
    return CudaPlatform(index)


class CudaClock:
    """Events on the stream that is current now."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))

    def elapsed_us(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


class CudaPlatform:
    """Captures on a stream of the thread's own, thread-locally, so that other threads' CUDA calls disturb nothing."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._lock = threading.Lock()  # of the next two
        self._recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()
        self._spent: list[Any] = []  # pools in which a capture was refused
        # All that torch hands out: it does so in turn from a fixed number, so a full round leaves the turn as it was.
        self._side_streams = [
            torch.cuda.Stream(self.device, priority=priority)
            for priority in (0, -1)
            for _ in range(_STREAMS_OF_A_PRIORITY)
        ]

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: Any) -> int:
        return sum(size for _, size in pool_segments(pool))

    def memory(self) -> DeviceMemory:
        return device_memory(self.device)

    def cached_bytes(self) -> int:
        return cached_bytes(self.device)

    def give_back(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        with self._lock:
            held = [one.pool for one in self._recordings if not one.released]
            unused = [pool for pool in self._spent if pool not in held]
            self._spent = [pool for pool in self._spent if pool in held]
        if any([let_go_of(pool, self.device) for pool in unused]):
            torch.cuda.empty_cache()

    def warm_up(self, step: Callable[[], T]) -> T:
        current, stream = torch.cuda.current_stream(self.device), capture_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = step()
        current.wait_stream(stream)
        return result

    def record(self, step: Callable[[], T], pool: Any) -> tuple[CudaRecording, T]:
        with self._capturing(pool) as segments:
            segments.open()
            result = step()
            recording = segments.finish()
        return recording, result

    def record_breakable(
        self, step: Callable[[], T], pool: Any, *, every_op: bool = False
    ) -> tuple[BreakableRecording, T]:
        with self._capturing(pool) as segments:
            parts, result = record_segments(segments, step, every_op=every_op)
        return BreakableRecording(parts, CudaClock, segments.kept), result

    def record_eager(self, step: Callable[[], T]) -> tuple[BreakableRecording, T]:
        refuse_capture_while_serving()
        return record_whole(step, CudaClock)

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> PinnedRing:
        return PinnedRing(host, slab)

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return shared_memory(shape, dtype, self.device)

    def mark(self, *, asleep: bool = False) -> CudaMark:
        return CudaMark(self.device, asleep=asleep)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return uploaded(values, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _capturing(self, pool: Any) -> Iterator[CudaSegments]:
        """Around a step that is captured; cleans up after an error."""
        refuse_capture_while_serving()
        current, stream = torch.cuda.current_stream(self.device), capture_stream(self.device)
        segments = CudaSegments(stream, pool, self._side_streams)
        stream.wait_stream(current)
        with _collector_off(), torch.cuda.stream(stream):
            try:
                with logging_regions(segments.log):
                    yield segments
                with self._lock:
                    self._recordings.update(segments.made)
            except BaseException as error:
                refused = segments.abandon(error)
                if segments.spent:
                    with self._lock:
                        self._spent.append(pool)
                if refused is error:
                    raise
                raise refused from error
        current.wait_stream(stream)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """A graph that the collector frees during a capture breaks it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
