"""The few questions about captures that the driver answers and torch does not ask, through ctypes.

Not through cuda.bindings: that is optional, and frees the edges' data before it hands them out
(NVIDIA/cuda-python#1804).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from stepgraph.runtime.errors import CaptureError

Edge = tuple[int, int, bool]
"""(handle of a node, handle of one that waits for it, whether programmatically)"""

CaptureState = tuple[int, int, list[int]]
"""(graph, how many nodes it has, the nodes that the stream's next one would wait for)"""

_CAPTURE_ACTIVE = 1
_PROGRAMMATIC = 1
_OUT_OF_MEMORY = 2
_NON_BLOCKING = 1
_NODE_TYPES = (
    "kernel", "memcpy", "memset", "host", "graph", "empty", "wait_event", "event_record", "ext_semas_signal",
    "ext_semas_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional",
)  # fmt: skip
"""The driver's CUgraphNodeType, by value."""


class _EdgeData(ctypes.Structure):
    """The driver's CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


@dataclass(frozen=True)
class CaptureInfo:
    """A capture as one of its streams sees it. tips: the nodes that the stream's next one would wait for."""

    id: int
    graph: int
    tips: tuple[int, ...]


def count_types(graph: int) -> dict[str, int]:
    """How many nodes of each type a graph has, without those inside child graphs. About 1 µs a node."""
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    checked(libcuda().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        checked(libcuda().cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    type_of, out, counts = libcuda().cuGraphNodeGetType, ctypes.byref(kind), Counter[int]()
    for node in nodes:
        checked(type_of(ctypes.c_void_p(node), out))
        counts[kind.value] += 1
    known = dict(enumerate(_NODE_TYPES))
    return {known.get(value, str(value)): number for value, number in counts.most_common()}


def new_stream() -> int:
    """A stream on this thread's context, of normal priority, that the default stream does not wait for."""
    stream = ctypes.c_void_p()
    error = libcuda().cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    if error:
        raise RuntimeError(f"the driver gives no stream: error {error}")
    return stream.value or 0


def upload(executable: int, stream: int) -> None:
    """Bring an executable graph to the device, so that its first launch takes no memory any more.

    Raises:
        torch.OutOfMemoryError: the driver found no room for it.
    """
    error = libcuda().cuGraphUpload(ctypes.c_void_p(executable), ctypes.c_void_p(stream))
    if error == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("the driver has no memory for the executable graph")
    checked(error)


def edges(graph: int) -> list[Edge]:
    """Every edge of a graph."""
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    get_edges = libcuda().cuGraphGetEdges_v2
    checked(get_edges(handle, None, None, None, ctypes.byref(count)))
    if not count.value:  # a single node; the driver refuses to fill arrays of no length
        return []
    source, target = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = (_EdgeData * count.value)()
    checked(get_edges(handle, source, target, data, ctypes.byref(count)))
    return [(s, t, d.type == _PROGRAMMATIC) for s, t, d in zip(source, target, data, strict=True)]


def dependencies(node: int) -> list[int]:
    """The nodes that one waits for. None where the driver is too old to tell."""
    handle, count = ctypes.c_void_p(node), ctypes.c_size_t()
    get_dependencies = getattr(libcuda(), "cuGraphNodeGetDependencies_v2", None)
    if get_dependencies is None:
        return []
    checked(get_dependencies(handle, None, None, ctypes.byref(count)))
    if not count.value:
        return []
    nodes, data = (ctypes.c_void_p * count.value)(), (_EdgeData * count.value)()
    checked(get_dependencies(handle, nodes, data, ctypes.byref(count)))
    return [node for node in nodes if node is not None]


def capture_info(stream: int) -> CaptureInfo | None:
    """The capture that a stream is in. None outside one, in one that is broken, or if the driver is too old to tell."""
    get_info = getattr(libcuda(), "cuStreamGetCaptureInfo_v3", None)
    if get_info is None:
        return None
    status, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    tips, data, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p(), ctypes.c_size_t()
    outputs = [ctypes.byref(value) for value in (status, capture, graph, tips, data, count)]
    if get_info(ctypes.c_void_p(stream), *outputs) or status.value != _CAPTURE_ACTIVE:
        return None
    found = tuple(tip for tip in tips[: count.value] if tip is not None)
    return CaptureInfo(capture.value, graph.value or 0, found)


class CaptureView:
    """What one stream's capture has come to, asked many times: two calls of the driver, about 3 µs."""

    def __init__(self, stream: int) -> None:
        self._status, self._graph = ctypes.c_int(), ctypes.c_void_p()
        self._tips, self._num_tips = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        self._num_nodes = ctypes.c_size_t()
        unused = ctypes.c_uint64(), ctypes.c_void_p()
        outputs = self._status, unused[0], self._graph, self._tips, unused[1], self._num_tips
        self._arguments = ctypes.c_void_p(stream), *(ctypes.byref(value) for value in outputs)
        self._get_info = getattr(libcuda(), "cuStreamGetCaptureInfo_v3", None)
        self._get_nodes = libcuda().cuGraphGetNodes
        self._out_nodes = ctypes.byref(self._num_nodes)

    def __call__(self) -> CaptureState | None:
        """Nothing outside a capture, in one that is broken, or if the driver is too old to tell."""
        if self._get_info is None or self._get_info(*self._arguments) or self._status.value != _CAPTURE_ACTIVE:
            return None
        if self._get_nodes(self._graph, None, self._out_nodes):
            return None
        return self._graph.value or 0, self._num_nodes.value, self._tips[: self._num_tips.value]


def capturing(streams: Iterable[int]) -> list[int]:
    """Those of the streams that are in a capture, whichever it is. Most are in none, and asking that is cheap."""
    status = ctypes.c_int()
    out, ask = ctypes.byref(status), libcuda().cuStreamIsCapturing
    return [stream for stream in streams if not ask(ctypes.c_void_p(stream), out) and status.value == _CAPTURE_ACTIVE]


def unjoined(stream: int, others: Iterable[int]) -> list[int]:
    """Those of the other streams that `stream`'s capture has spread to and whose last work it does not wait for yet."""
    main = capture_info(stream)
    if main is None:
        return []
    loose: dict[int, tuple[int, ...]] = {}
    for other in capturing(others):
        info = capture_info(other)
        if other != stream and info is not None and info.id == main.id and not set(info.tips) <= set(main.tips):
            loose[other] = info.tips
    if not loose:
        return []
    joined: set[int] = set()
    to_visit = list(main.tips)
    while to_visit:
        node = to_visit.pop()
        if node not in joined:
            joined.add(node)
            to_visit += dependencies(node)
    return [other for other, tips in loose.items() if not joined.issuperset(tips)]


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def checked(error: int) -> None:
    """Raises CaptureError where the driver returned an error."""
    if error:
        raise CaptureError(f"the driver refuses to work on this graph: error {error}")
