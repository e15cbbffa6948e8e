"""The account of real steps on a GPU: what it promises of itself, and faults that were planted."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
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

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
CONTEXT, COUNT = 512, 20


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return random_model("llama-3-8b", device="cuda", dtype=torch.bfloat16, max_positions=CONTEXT + 1)


@pytest.fixture(scope="module")
def limits() -> dict[str, Any]:
    return measure_limits()


@pytest.fixture(scope="module")
def found(model: DecoderModel) -> dict[str, Accounted]:
    """All in one account, by name: a second one's plain times would be slowed by the profiler of the first."""
    one_graph, eager = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1])), GraphConfig.preset("NONE")
    with torch.inference_mode():
        decode = DecodeRows(model, one_graph, rows=1, context=CONTEXT)
        decode.core.capture()
        decode.stage(1)
        eagerly = decode.another(eager)
        graph = Way("graph", decode.step, decode.rewind)
        ways = [Way("eager", lambda: decode.step(eagerly), decode.rewind), graph]
        ways += [replace(host_stall(graph, 200), name="host stall"), replace(idle_break(graph, 100), name="idle break")]
        return {one.name: one for one in account(ways, COUNT)}


@pytest.fixture(scope="module")
def one_row(found: dict[str, Accounted], model: DecoderModel, limits: dict[str, Any]) -> DecodeAccount:
    return account_decode(model, "llama-3-8b", context=CONTEXT, count=COUNT, limits=limits)


def test_the_residual_is_small(found: dict[str, Accounted]) -> None:
    for one in found.values():
        assert one.residual is not None
        assert abs(one.residual) <= 0.01 * statistics.median(one.profiled), one.name


def test_the_profiler_makes_no_step_a_multiple_as_long(found: dict[str, Accounted]) -> None:
    """3 % eagerly and 8 % as a graph is what is wanted; how far hosts are from it is in docs/open-ends.md."""
    for name in ("eager", "graph"):
        assert ratio(list(zip(found[name].profiled, found[name].plain, strict=True)))[0] <= 2, name


def test_without_the_profilers_own_the_graph_takes_what_it_takes_without_a_profiler(
    found: dict[str, Accounted],
) -> None:
    graph = found["graph"]
    assert graph.median("profiler") > 0 and graph.median("before_first") < 100
    assert graph.median("total") == pytest.approx(statistics.median(graph.plain), rel=0.02)


def test_the_trace_agrees_with_a_clock_inside_the_graph(one_row: DecodeAccount) -> None:
    check = one_row.check
    assert ratio(list(zip(check.traced, check.profiled, strict=True)))[0] == pytest.approx(1, abs=0.01)
    assert statistics.median(check.plain) <= statistics.median(check.profiled) * 1.01


def test_graph_and_eager_run_the_same_work(one_row: DecodeAccount) -> None:
    eager, graph = (found.parts(None) for found in one_row.found)
    assert graph.launches == 1 and eager.launches > 160
    assert abs(graph.activities - eager.activities) <= 8  # what a host-owned slot's copies make of it


def test_one_row_reads_as_a_graph_and_launches_eagerly(found: dict[str, Accounted], one_row: DecodeAccount) -> None:
    eager, graph = (found[name].verdict(one_row.floor) for name in ("eager", "graph"))
    assert eager.bound is Bound.LAUNCHING, eager
    assert graph.bound is Bound.READING and not graph.findings, graph


def test_a_large_batch_computes(model: DecoderModel, limits: dict[str, Any]) -> None:
    done = account_decode(model, "llama-3-8b", rows=512, context=64, count=10, limits=limits)
    graph = done.found[1].verdict(done.floor)
    assert graph.bound is Bound.ARITHMETIC, graph


def microseconds(finding: str, what: str) -> int:
    found = re.match(rf"{what}: (\d+) of ", finding)
    assert found, finding
    return int(found[1])


def test_a_planted_host_stall(found: dict[str, Accounted]) -> None:
    """200 µs, and the launch. The profiler's own, four hundred, is known to some tens of µs."""
    (finding,) = found["host stall"].verdict(None).findings
    assert 150 <= microseconds(finding, "host stall") <= 280, finding


def test_a_planted_idle_break(found: dict[str, Accounted]) -> None:
    """100 µs, the host's return from its wait, and the launch."""
    (finding,) = found["idle break"].verdict(None).findings
    assert 60 <= microseconds(finding, "idle break") <= 200 and "the host had launched nothing" in finding, finding
