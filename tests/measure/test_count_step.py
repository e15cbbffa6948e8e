"""One step counted twice, as the census prints it."""

import pytest
import torch

from stepgraph.measure.count_step import MOST_ROWS, StepCount, census_result, count_step
from stepgraph.measure.trace.launched import Launch
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.regions import region

NODES = [
    GraphNode(0, "kernel", "gather", "embedding"),
    GraphNode(1, "kernel", "gemm", "layers.0/qkv"),
    GraphNode(2, "kernel", "splitKreduce_kernel", "layers.0/qkv"),
    GraphNode(3, "kernel", "gemm", "layers.1/qkv"),
    GraphNode(4, "kernel", "head", "lm_head"),
    GraphNode(5, "memset", "", "lm_head"),
]
LAUNCHES = [
    Launch("kernel", "gather", "embedding", "aten::embedding"),
    Launch("kernel", "gemm", "layers.0/qkv", "aten::linear"),
    Launch("kernel", "gemm", "layers.1/qkv", "aten::linear"),
    Launch("kernel", "_norm", "layers.1/norm", ""),
]


def test_both_counts_stand_side_by_side() -> None:
    result = census_result(StepCount(NODES, LAUNCHES), "a step", "cuda")
    assert {figure.name: figure.median for figure in result.figures} == {
        "graph: all": 6,
        "graph: own": 4,
        "graph: own, a layer": 1,
        "graph: added": 2,
        "eager: all": 4,
        "eager: own": 4,
        "eager: own, a layer": 1.5,
        "eager: added": 0,
        "usually counted": 30,
    }
    operations, kernels, by_operator = result.tables
    assert [list(row) for row in operations.rows] == [
        ["qkv", "layers", 2, 1, 2, 0],
        ["norm", "layers", 0, 0, 1, 0],
        ["embedding", "around", 1, 0, 1, 0],
        ["lm_head", "around", 1, 1, 0, 0],
    ]
    assert ["kernel", "splitKreduce_kernel", 1, "yes"] in [list(row) for row in kernels.rows]
    assert sum(row[2] for row in kernels.rows) == 6
    told = result.to_json()
    assert [list(row) for row in by_operator.rows] == [
        ["aten::linear", "kernel", 2],
        ["aten::embedding", "kernel", 1],
        ["none of torch's", "kernel", 1],
    ]
    assert len(told["nodes"]["rows"]) == 6 and not result.notes
    assert told["launches"]["rows"][1] == ["layers.0/qkv", "aten::linear", "kernel", "gemm", False]


def test_an_operation_that_is_in_the_layers_and_around_them() -> None:
    nodes = [GraphNode(0, "kernel", "a", "layers.0/norm"), GraphNode(1, "kernel", "a", "norm")]
    table = census_result(StepCount(nodes, None), "a step", "cuda").tables[0]
    assert [list(row) for row in table.rows] == [["norm", "layers", 1, 0], ["norm", "around", 1, 0]]


def test_long_tables_end_in_a_sum() -> None:
    nodes = [GraphNode(i, "kernel", f"k{i}", "layers.0/x") for i in range(MOST_ROWS + 3)]
    kernels = census_result(StepCount(nodes, None), "a step", "cpu").tables[1]
    assert len(kernels.rows) == MOST_ROWS + 1 and list(kernels.rows[-1]) == ["3 others", "", 3, ""]


def test_what_could_not_be_counted_is_said() -> None:
    told = census_result(StepCount(None, LAUNCHES, why_no_nodes="refused at line 3"), "a step", "cuda")
    assert told.notes == ["No graph: refused at line 3"] and len(told.tables) == 3
    neither = census_result(StepCount(None, None, "refused", "no device"), "a step", "cpu")
    assert not neither.figures and "the tape records" in neither.notes[0] and len(neither.notes) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the tape's operators")
def test_any_step_function_is_counted() -> None:
    x, calls = torch.ones(3), []

    def step() -> None:
        for layer in range(2):
            with region(f"layers.{layer}"), region("double"):
                x.mul_(2)
        x.add_(1)

    counted = count_step(step, "cpu", lambda: calls.append(1))
    assert [node.region for node in counted.nodes or ()] == ["layers.0/double", "layers.1/double", ""]
    assert counted.launches is None and "there is none" in counted.why_no_launches and calls


def test_a_step_that_cannot_be_recorded_says_why() -> None:
    x = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    counted = count_step(lambda: x.add_(float(x.sum().item())), x.device)
    assert counted.nodes is None and "refused" in counted.why_no_nodes


@pytest.mark.gpu
def test_a_step_on_the_device() -> None:
    x, w = torch.ones(8, 64, device="cuda"), torch.ones(64, 64, device="cuda")

    def step() -> None:
        for layer in range(3):
            with region(f"layers.{layer}"), region("product"):
                x.copy_(x @ w)

    pytest.importorskip("cuda.bindings.driver")
    result = census_result(count_step(step, "cuda"), "a step", "cuda")
    figures = {figure.name: figure.median for figure in result.figures}
    assert figures["graph: all"] >= 6 and figures["graph: own"] == figures["eager: own"]
