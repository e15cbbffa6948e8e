"""The account of real steps on a GPU: what it promises of itself, and faults that were planted."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from stepgraph.engine.model import DecoderModel
from stepgraph.engine.random_model import random_model
from stepgraph.measure.account import Accounted, Way, account
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.decode_account import DecodeAccount, account_decode, measure_limits
from stepgraph.measure.planted import host_stall, idle_break
from stepgraph.measure.stats import ratio
from stepgraph.measure.verdict import Bound
from stepgraph.runtime import GraphConfig, Ladder

pytestmark = pytest.mark.gpu
CONTEXT, COUNT = 512, 20


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return random_model("llama-3-8b", device="cuda", dtype=torch.bfloat16, max_positions=CONTEXT + 1)


@pytest.fixture(scope="module")
def limits() -> dict[str, Any]:
    return measure_limits()


@pytest.fixture(scope="module")
def one_row(model: DecoderModel, limits: dict[str, Any]) -> DecodeAccount:
    return account_decode(model, "llama-3-8b", context=CONTEXT, count=COUNT, limits=limits)


@pytest.fixture(scope="module")
def graph(model: DecoderModel) -> Way:
    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1]))
    with torch.inference_mode():
        decode = DecodeRows(model, config, rows=1, context=CONTEXT)
        decode.core.capture()
        decode.stage(1)
    return Way("graph", decode.step, decode.rewind)


def test_the_residual_and_the_dilation_are_small(one_row: DecodeAccount) -> None:
    for found, most in zip(one_row.found, (1.03, 1.08), strict=True):
        assert found.residual is not None
        assert abs(found.residual) <= 0.01 * statistics.median(found.profiled), found.name
        assert ratio(list(zip(found.profiled, found.plain, strict=True)))[0] <= most, found.name


def test_the_trace_agrees_with_a_clock_inside_the_graph(one_row: DecodeAccount) -> None:
    check = one_row.check
    assert ratio(list(zip(check.traced, check.profiled, strict=True)))[0] == pytest.approx(1, abs=0.01)
    assert statistics.median(check.plain) <= statistics.median(check.profiled) * 1.01


def test_graph_and_eager_run_the_same_work(one_row: DecodeAccount) -> None:
    eager, graph = (found.parts(None) for found in one_row.found)
    assert graph.launches == 1 and eager.launches > 300
    assert abs(graph.activities - eager.activities) <= 8  # what a host-owned slot's copies make of it


def test_one_row_reads_as_a_graph_and_launches_eagerly(one_row: DecodeAccount) -> None:
    eager, graph = (found.verdict(one_row.floor) for found in one_row.found)
    assert eager.bound is Bound.LAUNCHING, eager
    assert graph.bound is Bound.READING and not graph.findings, graph


def test_a_large_batch_computes(model: DecoderModel, limits: dict[str, Any]) -> None:
    done = account_decode(model, "llama-3-8b", rows=512, context=64, count=10, limits=limits)
    graph = done.found[1].verdict(done.floor)
    assert graph.bound is Bound.ARITHMETIC, graph


def of(way: Way) -> Accounted:
    with torch.inference_mode():
        (found,) = account([way], COUNT)
    return found


def test_a_planted_host_stall(graph: Way) -> None:
    (finding,) = of(host_stall(graph, 200)).verdict(None).findings
    assert finding.startswith("host stall: 2")


def test_a_planted_idle_break(graph: Way) -> None:
    (finding,) = of(idle_break(graph, 100)).verdict(None).findings
    assert finding.startswith("idle break: 1") and "the host had launched nothing" in finding
