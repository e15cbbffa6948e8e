"""Ladders fitted to traffic, and how they are scored."""

from __future__ import annotations

import numpy as np
import pytest
from measure.ladder_cases import AZURE, straight

from stepgraph.measure.ladder_fit.fit import LOADS, WEIGHT, fit_ladder
from stepgraph.measure.ladder_fit.histogram import Histogram
from stepgraph.measure.ladder_fit.limits import Limits
from stepgraph.measure.ladder_fit.peers import peers, tensorrt_llm
from stepgraph.measure.ladder_fit.plan import plan_ladder
from stepgraph.measure.ladder_fit.report import flags, plan_result
from stepgraph.measure.ladder_fit.requests import Requests
from stepgraph.measure.ladder_fit.server import Score, Server, score
from stepgraph.measure.ladder_fit.simulate import Served
from stepgraph.measure.ladder_fit.traffic import load_traffic
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder


def azure() -> Requests:
    found = load_traffic(AZURE)
    assert isinstance(found, Requests)
    return found


def test_a_histogram_is_fitted_exactly() -> None:
    server = Server(straight(16))
    fitted = fit_ladder(server, Histogram({3: 90, 9: 9, 10: 1}, "made up"), 3)
    assert fitted.ladder.sizes == (3, 9, 16) and fitted.round == 0
    assert fitted.proof.cost == fitted.proof.bound == pytest.approx(0.9 * 4.06e6 + 0.09 * 4.18e6 + 0.01 * 4.32e6)
    assert fitted.proof.steps.sum() == pytest.approx(WEIGHT) and fitted.proof.arcs > 0


def test_a_trace_is_fitted_to_what_its_own_ladder_makes_of_it() -> None:
    """The ladder that is best for every size captured is slower once longer steps have gathered more rows."""
    trace, server = azure().faster(4), Server(straight(256, 4.0, 0.08))
    fitted = fit_ladder(server, trace, 6)
    assert len(fitted.ladder) == 6 and fitted.ladder.max_size == 256 and fitted.round > 0
    assert fitted.proof.cost == fitted.proof.bound
    exact = score(server, server.traffic(trace), Ladder.explicit(range(1, 257))).served.ms_a_step
    for load in LOADS:  # no cliff a little above the rate
        served = score(server, server.traffic(trace.faster(load)), fitted.ladder).served
        assert exact * 0.8 < served.ms_a_step < exact * 1.3


def test_fewer_sizes_than_vllm_and_less_time() -> None:
    plan = plan_ladder(Server(straight(256)), azure(), 12, rate=4, holdout=True)
    ms = {name: scored.served.ms_a_step for name, scored in plan.scores.items()}
    assert ms["every size"] <= ms["fitted"] < ms["vLLM"] and plan.ratio < 1
    assert ms["fitted"] < ms["SGLang"] and len(plan.scores["fitted"].ladder) <= 12 < len(plan.scores["vLLM"].ladder)


def test_real_rows_context_moves_batches_and_no_padding() -> None:
    ladder = Ladder((2, 4))
    plain, long = (Server(straight(4), row_ns=ns).step_ns(ladder) for ns in (0, 1000))
    assert (long - plain).tolist() == [0, 1000, 2000, 3000, 4000] and plain[1] == plain[2] == straight(4).ns[2]


def test_a_score() -> None:
    one = Score(Ladder((2, 8)), Served(np.array([0, 1, 3, 0, 2, 0, 0, 0, 0]), np.ones(9, dtype=np.int64)))
    assert one.used == 2 and one.padded_share == pytest.approx((4 * 2 + 2 * 8) / 15 - 1)


def test_peers_as_published() -> None:
    assert [len(tensorrt_llm(2048)), len(tensorrt_llm(2048, powers=True))] == [49, 23]
    assert tensorrt_llm(100).sizes[-2:] == (96, 100) and tensorrt_llm(200, powers=True).sizes[-2:] == (128, 200)
    assert {name: len(ladder) for name, ladder in peers(512).items()} == {
        "vLLM": 51,
        "SGLang": 52,
        "TensorRT-LLM": 25,
        "TensorRT-LLM, before": 21,
        "every size": 512,
    }


def test_flags() -> None:
    assert flags(Ladder((1, 8, 64))) == {
        "vLLM": "--cudagraph-capture-sizes 1 8 64",
        "SGLang": "--cuda-graph-bs-decode 1 8 64",
        "stepgraph": "--ladder 1,8,64",
    }


def test_limits_are_a_number_of_sizes() -> None:
    assert Limits(12).most() == 12
    assert Limits(12, mib=100, mib_a_size=24).most() == 4
    assert Limits(12, mib=1000, seconds=0.3, mib_a_size=24, seconds_a_size=0.1).most() == 3
    for limits, message in (
        (Limits(0), "room for no size"),
        (Limits(12, mib=10, mib_a_size=24), "room for no size"),
        (Limits(12, mib=10), "needs --mib-a-size"),
        (Limits(12, seconds=10, seconds_a_size=0), "needs --seconds-a-size"),
    ):
        with pytest.raises(ConfigError, match=message):
            limits.most()


def test_a_plan_says_what_it_rests_on() -> None:
    counted = Histogram({3: 9, 5: 1}, "made up", left_out=4)
    result = plan_result(plan_ladder(Server(straight(8), row_ns=57_000), counted, 2, pictured=True))
    found = result.to_json()
    assert found["sizes"] == [3, 8] and found["flags"]["stepgraph"] == "--ladder 3,8"
    assert set(found["by_sizes"]) == {"1", "2", "3", "4", "6", "8"}
    assert found["proof"]["bound_ns"] == found["proof"]["cost_ns"]
    assert "10 steps of decoding, 4 others left out" in found["definition"] and "57 µs more" in found["definition"]
    assert [row[0] for row in found["tables"][0]["rows"]][:2] == ["fitted", "vLLM"]


def test_what_has_no_arrivals() -> None:
    server, counted = Server(straight(8)), Histogram({3: 9}, "made up")
    for options in ({"rate": 2.0}, {"holdout": True}):
        with pytest.raises(ConfigError, match="no arrivals"):
            plan_ladder(server, counted, 2, **options)  # type: ignore[arg-type]
    one = Requests(np.array([0]), np.array([5]), np.array([9]))
    with pytest.raises(ConfigError, match="no request decodes"):
        plan_ladder(server, one, 2, holdout=True)
    with pytest.raises(ConfigError, match="not above 0"):
        plan_ladder(server, one, 2, rate=0)
