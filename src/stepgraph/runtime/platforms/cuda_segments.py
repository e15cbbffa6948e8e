"""Captures a step in one graph or in several, on one stream and into one pool."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from stepgraph.runtime.borrow import borrow
from stepgraph.runtime.errors import CaptureError, ReplayError, StepgraphError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.platforms.cuda_bindings import load_driver
from stepgraph.runtime.platforms.cuda_driver import CaptureView, count_types, unjoined, upload
from stepgraph.runtime.platforms.cuda_loop import CudaLoop
from stepgraph.runtime.platforms.cuda_memory import pool_segments
from stepgraph.runtime.platforms.cuda_streams import capture_stream
from stepgraph.runtime.platforms.cuda_walk import NewNodes, walk
from stepgraph.runtime.platforms.source_line import calling_line, raising_line
from stepgraph.runtime.regions import RegionLog


class CudaRecording:
    """One instantiated graph, and the captured one that it was made from.

    pool: where its memory lies. regions: of its nodes by handle; None where nothing could note them.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any, regions: Mapping[int, str] | None) -> None:
        self.pool = pool
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._launch: Callable[[], None] | None = super(torch.cuda.CUDAGraph, graph).replay  # without torch's frame
        self._regions = regions
        self.node_types: Mapping[str, int] = count_types(graph.raw_cuda_graph())
        self.instantiate_seconds = 0.0
        self._loop: CudaLoop | None = None

    @property
    def released(self) -> bool:
        return self._graph is None

    def instantiate(self, stream: torch.cuda.Stream) -> None:
        """Make it executable, and take all the memory that this needs.

        Raises:
            torch.OutOfMemoryError: the driver found no room for it.
        """
        assert self._graph is not None
        started = perf_counter()
        try:
            self._graph.instantiate()
        except RuntimeError as error:  # torch has no type of its own for the driver's want of memory
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError("the driver has no memory for the executable graph") from error
            raise
        if self.node_types and hasattr(self._graph, "raw_cuda_graph_exec"):  # else the first launch does it
            upload(self._graph.raw_cuda_graph_exec(), stream.cuda_stream)
        self.instantiate_seconds = perf_counter() - started

    @property
    def num_nodes(self) -> int | None:
        return None if self._regions is None else len(self._regions)

    def replay(self) -> None:
        if self._launch is None:
            raise ReplayError("this graph was released; capture again before replaying it")
        self._launch()

    def loop(self, terms: LoopTerms) -> Callable[[], None]:
        if self._graph is None:
            raise CaptureError("this graph was released; capture again before making a loop of it")
        if self._loop is None:
            self._loop = CudaLoop(self._graph.raw_cuda_graph(), terms, capture_stream(terms.control.device))
        return self._loop.replay

    def nodes(self) -> list[GraphNode]:
        if self._graph is None:
            raise CaptureError("this graph was released; capture again before reading its nodes")
        driver = load_driver()
        if driver is None or self._regions is None:
            raise CaptureError("reading a graph's nodes needs cuda.bindings; pip install cuda-bindings, then capture")
        return walk(driver, self._graph.raw_cuda_graph(), self._regions)

    def release(self) -> None:
        if self._loop is not None:
            self._loop.release()
            self._loop = None
        if self._graph is not None:
            self._graph.reset()
            self._graph = self._launch = None


class CudaSegments:
    """Makes recordings one after another; used with `stream` as the current stream.

    others: the streams that a step may fork to, for the error that names one which was left behind.
    made: all of them. kept: those without nodes; tensors may have been made while they were captured, so the pool
        needs them.
    spent: whether the driver refused to end a capture, which older torch never takes off the pool's count of users.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any, others: Sequence[torch.cuda.Stream]) -> None:
        self.kept: list[CudaRecording] = []
        driver = load_driver()
        self.log = None if driver is None else RegionLog(self._new_nodes)
        self._driver = driver
        self._look = CaptureView(stream.cuda_stream)
        self._stream, self._pool = stream, pool
        self._others = {other.cuda_stream: other for other in others}
        self._graph: torch.cuda.CUDAGraph | None = None  # the one that is being captured
        self._nodes: NewNodes | None = None
        self.made: list[CudaRecording] = []
        self.spent = False
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the break before: the place, the values
        self._pool_ranges: list[tuple[int, int]] | None = None

    def open(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # costs host memory only, and its nodes can be read later
        self._nodes = None if self._driver is None else NewNodes(self._driver, self._look)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def finish(self) -> CudaRecording:
        """End the capture. What it recorded has not run."""
        assert self._graph is not None, "open() comes first"
        graph, regions = self._graph, None
        if self.log is not None:
            self.log.settle()
            regions, self.log.regions = self.log.regions, {}
        self._refuse_unjoined()
        graph.capture_end()
        self._graph = None
        recording = CudaRecording(graph, self._pool, regions)
        self.made.append(recording)
        recording.instantiate(self._stream)
        return recording

    def close(self) -> CudaRecording | None:
        with _empty_graphs_allowed():
            recording = self.finish()
        with torch.inference_mode():  # a step of inference mode may have returned by now
            for place, values in self._results:
                place.copy_(values)
        self._results = []
        self._pool_ranges = None
        if not recording.node_types:
            self.kept.append(recording)
            return None
        recording.replay()
        return recording

    def aside(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the pool's tensors one that leaves the memory to the segments behind; others are kept, like weights."""
        return borrow(tensor) if _is_plain(tensor) and self._lies_in_pool(tensor) else tensor.detach()

    def place(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not _is_plain(result):
            return result, result
        placed = torch.empty_like(result)  # the pool's: its memory serves later segments once the step lets go of it
        held = borrow(placed)
        self._results.append((held, result))
        return placed, held

    def abandon(self, error: BaseException) -> BaseException:
        """After an error: leave the stream, the allocator and the pool as they were. Returns what to raise."""
        if self._graph is not None:
            error = _as_capture_error(error)
            for other in self._unjoined():
                self._stream.wait_stream(other)
            refused = self._end_failed(self._graph)
            self._graph = None
            if refused is not None and isinstance(error, torch.OutOfMemoryError):
                error = CaptureError(f"{error}; and the driver could not end the capture: {refused}")
        self._results = []
        if self.made:
            self._stream.synchronize()  # segments may still run
            for recording in self.made:
                recording.release()
        return error

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> str | None:
        """Returns why the driver refused to end the capture, if it did: the pool is spent then."""
        refused = None
        try:
            with _empty_graphs_allowed():
                graph.capture_end()
        except RuntimeError as error:
            refused, self.spent = str(error).strip().splitlines()[0], True
            # Older torch now leaves the allocator routed to the pool.
            with contextlib.suppress(RuntimeError):  # newer torch has ended it already
                torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
        graph.reset()
        return refused

    def _new_nodes(self) -> set[int]:
        return set() if self._graph is None or self._nodes is None else self._nodes()

    def _unjoined(self) -> list[torch.cuda.Stream]:
        return [self._others[handle] for handle in unjoined(self._stream.cuda_stream, self._others)]

    def _refuse_unjoined(self) -> None:
        left_behind = self._unjoined()
        if left_behind:
            names = ", ".join(map(str, left_behind))
            raise CaptureError(
                f"capture refused: {names} left behind with work that the step's own stream does not wait for; "
                f"call torch.cuda.current_stream().wait_stream(...) for it before a break and before the step returns "
                f"(at {calling_line()})"
            )

    def _lies_in_pool(self, tensor: torch.Tensor) -> bool:
        if self._pool_ranges is None:
            self._pool_ranges = [(start, start + size) for start, size in pool_segments(self._pool)]
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < stop for start, stop in self._pool_ranges)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether address, shape and strides are all there is to a tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_cuda and tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())


@contextlib.contextmanager
def _empty_graphs_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


def _as_capture_error(error: BaseException) -> BaseException:
    """CUDA's refusals name no line; ours do. Everything else stays what it was."""
    if isinstance(error, torch.OutOfMemoryError | StepgraphError) or not isinstance(error, RuntimeError):
        return error
    text = str(error)
    if "captur" not in text.lower():
        return error
    what = text.strip().splitlines()[0]
    return CaptureError(f"capture refused: {what} (at {raising_line(error.__traceback__)})")
