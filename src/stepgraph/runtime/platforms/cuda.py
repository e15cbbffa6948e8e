"""CUDA graphs through torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stepgraph.runtime.errors import CaptureError, ConfigError, ReplayError, StepgraphError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms.cuda_walk import NewNodes, load_driver, walk
from stepgraph.runtime.platforms.source_line import raising_line
from stepgraph.runtime.regions import RegionLog, logging_regions

T = TypeVar("T")


def why_unavailable() -> str | None:
    """Why CUDA does not work here, or None where it does."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (driver missing, or no GPU in this machine)"
    return None


class CudaRecording:
    """One instantiated graph, and the captured one that it was made from.

    regions: of its nodes by handle; None where nothing could note them.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, regions: Mapping[int, str] | None) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._regions = regions
        self.num_nodes: int | None = None if regions is None else len(regions)

    def replay(self) -> None:
        if self._graph is None:
            raise ReplayError("this graph was released; capture again before replaying it")
        self._graph.replay()

    def nodes(self) -> list[GraphNode]:
        if self._graph is None:
            raise CaptureError("this graph was released; capture again before reading its nodes")
        driver = load_driver()
        if driver is None or self._regions is None:
            raise CaptureError("reading a graph's nodes needs cuda.bindings; pip install cuda-bindings, then capture")
        return walk(driver, self._graph.raw_cuda_graph(), self._regions)

    def release(self) -> None:
        if self._graph is not None:
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
        self._spans: dict[
            tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]
        ] = {}  # slicing costs more than a look-up

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        for start, stop in ranges:
            self._bytes[turn][start:stop] = self._host[start:stop]
            if (start, stop) not in self._spans:
                self._spans[start, stop] = (self._slab[start:stop], [p[start:stop] for p in self._pinned])
            target, sources = self._spans[start, stop]
            target.copy_(sources[turn], non_blocking=True)
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

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = step()
        current.wait_stream(self._stream)
        return result

    def record(self, step: Callable[[], T], pool: Any) -> tuple[CudaRecording, T]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # costs host memory only, and its nodes can be read later
        driver = load_driver()
        log = None if driver is None else RegionLog(NewNodes(driver, self._stream.cuda_stream))
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with logging_regions(log):
                    result = step()
            except BaseException as error:
                self._abandon(graph, pool)
                raise _as_capture_error(error) from error
            try:
                graph.capture_end()
                graph.instantiate()
            except RuntimeError as error:
                self._abandon(graph, pool)
                raise _as_capture_error(error) from error
        current.wait_stream(self._stream)
        return CudaRecording(graph, None if log is None else log.regions), result

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
