"""Reads captured CUDA graphs through the driver: which nodes there are, and which of them are new during a capture."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.nodes import Dependency, Extent, GraphNode
from stepgraph.runtime.platforms.cuda_bindings import result_of
from stepgraph.runtime.platforms.cuda_driver import CaptureState, Edge, dependencies, edges

_demangle: Callable[[str], str] = getattr(torch._C, "_demangle", str)
_checked = partial(result_of, error=CaptureError, what="the driver cannot read this graph")


class NewNodes:
    """Called during a capture: the handles of the nodes that the stream's graph got since the last call.

    Handles are compared, since the driver promises no order. Nothing once the capture is broken.

    look: what the capture has come to; None once it is broken.
    """

    def __init__(
        self,
        driver: Any,
        look: Callable[[], CaptureState | None],
        dependencies_of: Callable[[int], list[int]] = dependencies,
    ) -> None:
        self._driver, self._look = driver, look
        self._dependencies_of = dependencies_of
        self._seen: set[int] = set()

    def __call__(self) -> set[int]:
        state = self._look()
        if state is None:
            return set()
        graph, count, tips = state
        missing = count - len(self._seen)
        if not missing:
            return set()
        new = self._behind(tips)
        if len(new) != missing:  # the rest is on a side stream that has not rejoined yet
            new = set(_handles(self._driver, graph)) - self._seen
        self._seen |= new
        return new

    def _behind(self, tips: Iterable[int]) -> set[int]:
        """The new nodes that the stream's next one would wait for: far fewer than there are nodes."""
        new: set[int] = set()
        to_visit = list(tips)
        while to_visit:
            node = to_visit.pop()
            if node not in self._seen and node not in new:
                new.add(node)
                to_visit += self._dependencies_of(node)
        return new


def walk(
    driver: Any, graph: int, regions: Mapping[int, str], edges_of: Callable[[int], list[Edge]] | None = None
) -> list[GraphNode]:
    """Every node of a captured graph, those of child graphs right after the node that holds them.

    regions: of the nodes by handle; a child graph's nodes have their parent's. Bodies of conditional nodes are not
    entered. Raises CaptureError where the driver refuses.
    """
    nodes: list[GraphNode] = []
    _walk(driver, graph, regions, edges_of or edges, nodes, None)
    return nodes


def _walk(
    driver: Any,
    graph: int,
    regions: Mapping[int, str],
    edges_of: Callable[[int], list[Edge]],
    nodes: list[GraphNode],
    parent: GraphNode | None,
) -> None:
    """Append the graph's nodes to `nodes`."""
    before: dict[int, list[tuple[int, bool]]] = {handle: [] for handle in _handles(driver, graph)}
    for source, target, programmatic in edges_of(graph):
        before[target].append((source, programmatic))
    place: dict[int, int] = {}
    for handle in _in_order(before):
        node = driver.CUgraphNode(handle)
        kind = _checked(driver.cuGraphNodeGetType(node))
        kind = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        name, grid, block, shared = _kernel(driver, node) if kind == "kernel" else ("", None, None, None)
        place[handle] = len(nodes)
        read = GraphNode(
            index=len(nodes),
            type=kind,
            name=name,
            region=regions.get(handle, "") if parent is None else parent.region,
            grid=grid,
            block=block,
            shared_bytes=shared,
            after=tuple(Dependency(place[source], programmatic) for source, programmatic in before[handle]),
            parent=None if parent is None else parent.index,
        )
        nodes.append(read)
        if kind == "graph":
            child = _checked(driver.cuGraphChildGraphNodeGetGraph(node))
            _walk(driver, int(child), regions, edges_of, nodes, read)


def _kernel(driver: Any, node: Any) -> tuple[str, Extent, Extent, int]:
    params = _checked(driver.cuGraphKernelNodeGetParams(node))
    grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
    block = (params.blockDimX, params.blockDimY, params.blockDimZ)
    name = ""
    # A kernel of a library that was loaded lazily has no function handle.
    for handle, name_of in ((params.func, driver.cuFuncGetName), (params.kern, driver.cuKernelGetName)):
        if not name and int(handle):
            error, found = name_of(handle)
            name = "" if int(error) else found.decode()
    return _demangle(name) if name.startswith("_Z") else name, grid, block, params.sharedMemBytes


def _in_order(before: Mapping[int, Iterable[tuple[int, bool]]]) -> list[int]:
    """The handles, each after those it waits for, otherwise as the driver lists them."""
    listed = {handle: position for position, handle in enumerate(before)}
    waiting = {handle: len(list(sources)) for handle, sources in before.items()}
    followers: dict[int, list[int]] = {handle: [] for handle in before}
    for handle, sources in before.items():
        for source, _ in sources:
            followers[source].append(handle)
    ready = [(listed[handle], handle) for handle, count in waiting.items() if not count]
    order = []
    while ready:
        _, handle = heapq.heappop(ready)
        order.append(handle)
        for follower in followers[handle]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (listed[follower], follower))
    return order


def _handles(driver: Any, graph: Any) -> list[int]:
    graph = driver.CUgraph(int(graph))
    _, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count))
    return [int(node) for node in nodes]
