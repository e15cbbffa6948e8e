"""CUDA graphs through torch, launched straight from the driver where that is possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from stepgraph.runtime.errors import CaptureError, ConfigError, StepgraphError
from stepgraph.runtime.platforms.source_line import raising_line

try:
    from cuda.bindings import driver
except ImportError:  # torch's own replay is used instead
    driver = None

T = TypeVar("T")


def why_unavailable() -> str | None:
    """Why CUDA does not work here, or None where it does."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (driver missing, or no GPU in this machine)"
    return None


class CudaRecording:
    """One instantiated graph.

    torch's `replay` refills its generators' seed and offset, two launches each time. A step that never drew from
    them is launched without.
    """

    num_nodes: int | None = None

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, draws: bool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._device = device
        self._executable = None if draws or driver is None else driver.CUgraphExec(graph.raw_cuda_graph_exec())

    def replay(self) -> None:
        if self._graph is None:
            raise StepgraphError("this graph was released; capture again before replaying it")
        if self._executable is None:
            self._graph.replay()
            return
        (status,) = driver.cuGraphLaunch(self._executable, torch.cuda.current_stream(self._device).cuda_stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise StepgraphError(f"graph launch failed with {status.name}; an earlier kernel may have faulted")

    def release(self) -> None:
        if self._graph is not None:
            self._executable = None
            self._graph.reset()
            self._graph = None


class PinnedRing:
    """Two pinned mirrors in turn: one may be rewritten while the copy from the other is still in flight."""

    def __init__(self, host: torch.Tensor, slab: torch.Tensor) -> None:
        self._host = host.numpy()
        self._slab = slab
        self._pinned = [torch.empty(host.numel(), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._bytes = [mirror.numpy() for mirror in self._pinned]
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._turn = 0

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        for start, stop in ranges:
            self._bytes[turn][start:stop] = self._host[start:stop]
            self._slab[start:stop].copy_(self._pinned[turn][start:stop], non_blocking=True)
        self._copied[turn].record()


class CudaPlatform:
    """Captures on a side stream, thread-locally, so that other threads' CUDA calls disturb nothing.

    Raises:
        ConfigError: no usable CUDA device.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        reason = why_unavailable()
        if reason is not None:
            raise ConfigError(f"device {device}: {reason}; use --device cpu")
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.Stream(self.device)
        self._draws = False  # whether any warmed-up step used torch's default generator

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], T]) -> T:
        generator = torch.cuda.default_generators[self.device.index]
        offset = generator.get_offset()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = step()
        current.wait_stream(self._stream)
        self._draws |= generator.get_offset() != offset
        return result

    def record(self, step: Callable[[], T], pool: Any) -> tuple[CudaRecording, T]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException as error:
                self._abandon(graph, pool)
                raise _as_capture_error(error) from error
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._abandon(graph, pool)
                raise _as_capture_error(error) from error
        current.wait_stream(self._stream)
        return CudaRecording(graph, self.device, self._draws), result

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> PinnedRing:
        return PinnedRing(host, slab)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a failed capture, so that the stream, the allocator and the pool are as before it."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The driver refused to end it; older torch then leaves the allocator routed to the pool.
            with contextlib.suppress(RuntimeError):  # newer torch has ended it already
                torch._C._cuda_endAllocateToPool(self.device.index, pool)
        graph.reset()


def _as_capture_error(error: BaseException) -> BaseException:
    """CUDA's refusals name no line; ours do. Everything else stays what it was."""
    if isinstance(error, torch.OutOfMemoryError | StepgraphError) or not isinstance(error, RuntimeError):
        return error
    text = str(error)
    if "captur" not in text.lower():
        return error
    what = text.strip().splitlines()[0]
    return CaptureError(f"capture refused: {what} (at {raising_line(error.__traceback__)})")
