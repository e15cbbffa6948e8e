"""The walk of a captured graph: on a driver made of dictionaries, and on the real one where there is a GPU."""

import enum
from types import SimpleNamespace

import pytest
import torch

from stepgraph.runtime import CaptureError
from stepgraph.runtime.nodes import Dependency
from stepgraph.runtime.platforms import cuda_driver
from stepgraph.runtime.platforms.cuda_walk import NewNodes, walk
from stepgraph.runtime.regions import region


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


OK, REFUSED = Result


class NodeType(enum.Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_GRAPH = 4


class FakeDriver:
    """Graphs by handle, each a list of nodes: a kernel's name, None for a memset, or a child graph's handle.

    A kernel whose name starts with `lib_` is one of a library: it has no function handle, as with lazy loading.
    """

    CUgraph = CUgraphNode = int

    def __init__(self, graphs: dict[int, list[tuple[int, str | int | None]]]) -> None:
        self.graphs = graphs
        self.broken, self.error = False, OK
        self.listings = 0
        self.tips: list[int] = []

    def what(self, node: int) -> str | int | None:
        return {handle: what for nodes in self.graphs.values() for handle, what in nodes}[node]

    def look(self) -> tuple[int, int, list[int]] | None:
        return None if self.broken else (1, len(self.graphs[1]), self.tips)

    def cuGraphGetNodes(self, graph: int, count: int = 0):  # noqa: N802
        nodes = [handle for handle, _ in self.graphs[graph]]
        self.listings += bool(count)
        return self.error, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, node: int):  # noqa: N802
        what = self.what(node)
        name = "MEMSET" if what is None else "GRAPH" if isinstance(what, int) else "KERNEL"
        return OK, NodeType[f"CU_GRAPH_NODE_TYPE_{name}"]

    def cuGraphKernelNodeGetParams(self, node: int):  # noqa: N802
        library = str(self.what(node)).startswith("lib_")
        sizes = {"gridDimX": node, "gridDimY": 2, "gridDimZ": 1, "blockDimX": 128, "blockDimY": 1, "blockDimZ": 1}
        return OK, SimpleNamespace(**sizes, sharedMemBytes=64, func=0 if library else node, kern=node if library else 0)

    def cuFuncGetName(self, handle: int):  # noqa: N802
        return OK, str(self.what(handle)).encode()

    cuKernelGetName = cuFuncGetName  # noqa: N815

    def cuGraphChildGraphNodeGetGraph(self, node: int):  # noqa: N802
        return OK, self.what(node)


def test_nodes_come_in_an_order_in_which_they_may_run() -> None:
    driver = FakeDriver({1: [(30, "c"), (10, "_Z1av"), (20, None), (40, "lib_d")]})
    edges = {1: [(10, 20, False), (20, 30, True), (10, 40, False)]}
    nodes = walk(driver, 1, {10: "in", 30: "out"}, edges.__getitem__)
    assert [(n.index, n.type, n.name, n.region) for n in nodes] == [
        (0, "kernel", "a()", "in"),
        (1, "memset", "", ""),
        (2, "kernel", "c", "out"),
        (3, "kernel", "lib_d", ""),
    ]
    assert [n.after for n in nodes] == [(), (Dependency(0),), (Dependency(1, True),), (Dependency(0),)]
    assert (nodes[0].grid, nodes[0].block, nodes[0].shared_bytes) == ((10, 2, 1), (128, 1, 1), 64)
    assert (nodes[1].grid, nodes[1].block, nodes[1].shared_bytes) == (None, None, None)


def test_child_graphs_are_entered_and_keep_the_region() -> None:
    driver = FakeDriver({1: [(10, 2), (20, "after")], 2: [(11, "x"), (12, 3)], 3: [(13, "y")]})
    edges = {1: [(10, 20, False)], 2: [(11, 12, False)], 3: []}
    nodes = walk(driver, 1, {10: "library", 20: "mine"}, edges.__getitem__)
    assert [(n.type, n.name, n.region, n.parent) for n in nodes] == [
        ("graph", "", "library", None),
        ("kernel", "x", "library", 0),
        ("graph", "", "library", 0),
        ("kernel", "y", "library", 2),
        ("kernel", "after", "mine", None),
    ]
    assert nodes[4].after == (Dependency(0),)


def test_an_empty_graph() -> None:
    assert walk(FakeDriver({1: []}), 1, {}, lambda graph: []) == []


def test_a_driver_that_refuses() -> None:
    driver = FakeDriver({1: [(10, "a")]})
    driver.error = REFUSED
    with pytest.raises(CaptureError, match="the driver cannot read this graph: CUDA_ERROR_INVALID_VALUE"):
        walk(driver, 1, {}, lambda graph: [])


def test_new_nodes_are_told_by_handle_and_once() -> None:
    driver = FakeDriver({1: []})
    new = NewNodes(driver, driver.look)
    assert new() == set()
    driver.graphs[1] = [(10, "a")]
    assert new() == {10}
    driver.graphs[1] = [(30, "c"), (10, "a"), (20, "b")]  # no promise of order
    assert new() == {20, 30}
    listings = driver.listings
    assert new() == set() and driver.listings == listings  # nothing new: the nodes are not even listed


def test_new_nodes_are_found_from_the_streams_last_one() -> None:
    driver, asked = FakeDriver({1: [(10, "a")]}), []
    before = {10: [], 20: [10], 30: [20], 40: [30], 50: []}
    new = NewNodes(driver, driver.look, dependencies_of=lambda node: asked.append(node) or before[node])
    driver.tips = [10]
    assert new() == {10}
    asked.clear()
    driver.graphs[1] = [(n, "k") for n in (30, 10, 20)]
    driver.tips = [30]
    assert new() == {20, 30} and asked == [30, 20] and not driver.listings
    driver.graphs[1] += [(40, "main"), (50, "a side stream")]
    driver.tips = [40]
    assert new() == {40, 50} and driver.listings == 1


def test_streams_that_have_not_rejoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main (1) is behind node 30. Streams 2 and 3 are in its capture; 4 is in another one, 5 in none."""
    before = {10: [], 20: [10], 25: [10], 30: [20], 40: [25]}
    infos = {1: (7, (30,)), 2: (7, (20,)), 3: (7, (40,)), 4: (8, (99,))}
    info = {stream: cuda_driver.CaptureInfo(capture, 1, tips) for stream, (capture, tips) in infos.items()}
    monkeypatch.setattr(cuda_driver, "capturing", lambda streams: [stream for stream in streams if stream in info])
    monkeypatch.setattr(cuda_driver, "capture_info", info.get)
    monkeypatch.setattr(cuda_driver, "dependencies", before.__getitem__)
    assert cuda_driver.unjoined(1, [1, 2, 3, 4, 5]) == [3]
    before[30].append(40)
    assert cuda_driver.unjoined(1, [1, 2, 3, 4, 5]) == []
    assert cuda_driver.unjoined(5, [1, 2, 3]) == []


def test_new_nodes_of_a_broken_capture_are_none() -> None:
    driver = FakeDriver({1: [(10, "a")]})
    new = NewNodes(driver, driver.look)
    driver.broken = True
    assert new() == set()


@pytest.mark.gpu
def test_a_torch_capture_is_walked() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from runtime.kernels import add_one

    from stepgraph.runtime.platforms import platform_for

    platform, x = platform_for("cuda"), torch.zeros(1000, device="cuda")

    def step() -> None:
        with region("sum"):
            torch.add(x, 1, out=x)
        with region("triton"):
            add_one[(3,)](x, x.numel(), BLOCK=512, WAIT=False)
            add_one[(3,)](x, x.numel(), BLOCK=512, WAIT=True, launch_pdl=True)
        with region("set"):
            x.zero_()

    platform.warm_up(step)
    recording, _ = platform.record(step, platform.new_pool())
    nodes = recording.nodes()
    assert [n.region for n in nodes] == ["sum", "triton", "triton", "set"]
    assert recording.num_nodes == 4
    assert "elementwise" in nodes[0].name
    assert [n.name for n in nodes[1:3]] == ["add_one"] * 2 and [n.grid for n in nodes[1:3]] == [(3, 1, 1)] * 2
    assert [n.type for n in nodes[:3]] == ["kernel"] * 3 and nodes[3].type in ("memset", "kernel")
    assert all(n.block is not None and n.block[0] >= 32 for n in nodes[:3])
    assert [n.after for n in nodes] == [(), (Dependency(0),), (Dependency(1, True),), (Dependency(2),)]
    for _ in range(2):
        recording.replay()
    assert not x.any()


@pytest.mark.gpu
def test_without_cuda_bindings_a_graph_replays_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepgraph.runtime.platforms import cuda_segments, platform_for

    monkeypatch.setattr(cuda_segments, "load_driver", lambda: None)
    platform, x = platform_for("cuda"), torch.zeros(4, device="cuda")

    def step() -> None:
        with region("add"):
            x.add_(1)

    platform.warm_up(step)
    recording, _ = platform.record(step, platform.new_pool())
    recording.replay()
    assert x.tolist() == [2] * 4 and recording.num_nodes is None
    with pytest.raises(CaptureError, match="cuda.bindings"):
        recording.nodes()
