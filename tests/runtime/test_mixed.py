"""Both phases through one runner: keys of the token count, queries of several tokens, adapters, and debug modes."""

import logging
import random

import numpy as np
import pytest
import torch
from runtime.sums import MAX_REQUESTS, MAX_TOKENS, SLOTS, sums_runner

from stepgraph.runtime import (
    Backend,
    BatchDescriptor,
    ConfigError,
    DecodePhase,
    GraphConfig,
    GraphRunner,
    InputError,
    Ladder,
    Mode,
    PaddingPolicy,
    PrefillPhase,
    Reason,
    Slot,
    StaticBuffers,
    StepOutput,
    graph_break,
)
from stepgraph.runtime.graphs import BreakTotal

DECODE, TOKENS = Ladder.explicit([2, 4, 8]), Ladder.explicit([2, 4, 8, 32])


def config(mode: str, query_lens=(1, 2), **kwargs) -> GraphConfig:
    wanted = {"ladder": DECODE, "prefill_ladder": TOKENS, "query_lens": query_lens}
    return GraphConfig.preset(mode, **wanted, **kwargs)


def some_batch(rng: random.Random) -> tuple[dict, list[int]]:
    """Arguments of a call, and how many tokens each request brings."""
    requests = rng.randint(1, MAX_REQUESTS)
    kind = rng.choice(["decode", "two", "mixed"])
    lens = [{"decode": 1, "two": 2}.get(kind, rng.randint(1, MAX_TOKENS // MAX_REQUESTS)) for _ in range(requests)]
    ids = [rng.randrange(100) for _ in range(sum(lens))]
    call = {"num_requests": requests, "ids": ids, "query_lens": lens}
    if kind == "mixed":
        return {**call, "num_tokens": len(ids)}, lens
    return {**call, "query_len": lens[0]}, lens


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("debug", ["off", "eager-through-graph", "break-every-op"])
def test_every_mode_equals_eager(device, mode: str, debug: str) -> None:
    """Rule 9: random batches of all kinds; joins and leaves; the device carries the totals."""
    rng = random.Random(3)
    graphs, eager = sums_runner(config(mode, debug=debug), device), sums_runner(config("NONE"), device)
    for _ in range(60):
        call, lens = some_batch(rng)
        replayed, expected = graphs(**call), eager(**call)
        assert replayed.looked_up.shape == (sum(lens),) and replayed.sums.shape == (len(lens),)
        for name in ("total", "sums", "looked_up"):
            assert torch.equal(getattr(replayed, name), getattr(expected, name))
        assert torch.equal(graphs.buffers["total"], eager.buffers["total"])
    modes = graphs.stats.by_mode()
    wanted = {
        "FULL": {"FULL"},
        "PIECEWISE": {"BREAKABLE"},
        "FULL_AND_PIECEWISE": {"FULL", "BREAKABLE"},
        "FULL_DECODE_ONLY": {"FULL", "EAGER"},
    }
    assert set(modes) - {"EAGER"} == wanted[mode] - {"EAGER"}
    assert sum(modes.values()) == sum(graphs.stats.by_reason().values()) == 60


def test_the_walk(device) -> None:
    """Thirteen decodes take the full graph of sixteen; one query of two tokens takes the key of its token count."""
    slots = [Slot(s.name, s.dtype, s.per, s.pad, owner=s.owner, mixed_only=s.mixed_only) for s in SLOTS]
    buffers = StaticBuffers(max_requests=16, max_tokens=32, slots=slots, device=device)
    sums = sums_runner(config("NONE"), device)._run.step
    ladders = {"ladder": Ladder.explicit([8, 16]), "prefill_ladder": Ladder.explicit([16, 32])}
    runner = GraphRunner(sums, buffers, GraphConfig.preset("FULL_AND_PIECEWISE", **ladders))
    runner.capture()
    own = StaticBuffers(max_requests=16, max_tokens=32, slots=slots, device=device)
    eager = GraphRunner(sums, own, GraphConfig.preset("NONE"))

    def step(**call) -> StepOutput:
        out, expected = runner(**call), eager(**call)
        assert expected.mode is Mode.EAGER
        for name in ("total", "sums", "looked_up"):
            assert torch.equal(getattr(out, name), getattr(expected, name))
        return out

    out = step(ids=range(13), query_lens=[1] * 13)
    assert (out.mode, out.real, out.padded, out.reason) == (Mode.FULL, 13, 16, Reason.PADDED)
    out = step(ids=range(14), query_lens=[2] + [1] * 12, num_tokens=14)
    assert (out.mode, out.real, out.padded, out.reason) == (Mode.BREAKABLE, 14, 16, Reason.PADDED)
    assert out.decision.key == BatchDescriptor.relaxed(16) and out.sums.shape == (13,)
    assert runner.graph(BatchDescriptor.relaxed(16)).recording.breaks
    assert step(ids=range(20, 33), query_lens=[1] * 13).mode is Mode.FULL


def test_views_follow_the_key() -> None:
    seen = {}

    def step(ids, total, query_lens=None):
        seen[len(ids), len(total), query_lens is not None and len(query_lens)] = True
        return ids + 0

    buffers = StaticBuffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, slots=SLOTS)
    phases = (
        DecodePhase(Backend.FULL, Ladder.explicit([4]), query_lens=(1, 2)),
        PrefillPhase(Backend.FULL, Ladder.explicit([2, 16]), max_requests=3),
    )
    runner = GraphRunner(step, buffers, GraphConfig(*phases))
    runner.capture()
    assert set(seen) == {(16, 3, 3), (2, 2, 2), (8, 4, False), (4, 4, False)}
    seen.clear()
    out = runner(num_requests=5, num_tokens=9)
    assert (out.mode, out.reason) == (Mode.EAGER, Reason.TOO_MANY_REQUESTS) and set(seen) == {(9, 5, 5)}
    assert "3 request slots" in out.decision.detail


def test_request_slots_that_no_request_takes_hold_their_padding(device) -> None:
    runner = sums_runner(config("FULL"), device)
    runner(num_tokens=32, ids=[5] * 32, query_lens=[4] * 8)
    runner(num_tokens=7, ids=[3] * 7, query_lens=[5, 2])
    assert runner.buffers["query_lens"].tolist() == [5, 2] + [0] * 6
    assert runner.buffers["ids"][:8].tolist() == [3] * 7 + [0]
    assert runner.buffers["total"][2:].eq(0).all()


def test_units_of_outputs_are_told_apart_by_one_more_run() -> None:
    """No key here has more tokens than request rows."""
    ladder = Ladder.explicit([4, 8])
    runner = sums_runner(GraphConfig(prefill=PrefillPhase(Backend.FULL, ladder)))
    out = runner(num_requests=2, num_tokens=7, ids=[1] * 7, query_lens=[3, 4])
    assert out.mode is Mode.FULL and out.sums.shape == (2,) and out.looked_up.shape == (7,)


def test_the_padding_guard() -> None:
    ladder = Ladder.explicit([8, 32])
    phase = PrefillPhase(Backend.FULL, ladder, pad_factor=2, pad_floor=8)
    runner = sums_runner(GraphConfig(prefill=phase))
    reasons = {
        tokens: runner(num_requests=1, num_tokens=tokens, ids=[1] * tokens, query_lens=[tokens]).reason
        for tokens in (1, 8, 9, 16, 32)
    }
    padded, over = Reason.PADDED, Reason.OVER_PADDED
    assert reasons == {1: padded, 8: Reason.EXACT, 9: over, 16: padded, 32: Reason.EXACT}


def test_each_reason_is_told_once_a_phase(caplog: pytest.LogCaptureFixture) -> None:
    phases = DecodePhase(Backend.FULL, Ladder.explicit([4])), PrefillPhase(Backend.FULL, Ladder.explicit([4]))
    runner = sums_runner(GraphConfig(*phases))
    told = [record.message for record in caplog.records]
    assert any(message.startswith("batches of 5 to 8 requests run eagerly (above_ladder)") for message in told)
    assert any(message.startswith("batches of 5 to 32 tokens run eagerly (above_ladder)") for message in told)
    caplog.clear()
    for _ in range(2):
        for requests in (5, 6):
            runner(ids=[1] * requests, num_requests=requests, query_lens=[1] * requests)
            runner(ids=[1] * 9, num_requests=2, num_tokens=9, query_lens=[4, 5])
    assert len(caplog.records) == 2 and {record.levelno for record in caplog.records} == {logging.WARNING}


def test_the_adapters_case_reaches_the_step() -> None:
    seen = []

    def step(ids: torch.Tensor, num_loras: int) -> torch.Tensor:
        seen.append(num_loras)
        return ids + num_loras

    slots = [Slot("ids", torch.int64, "request", PaddingPolicy.ZERO)]
    buffers = StaticBuffers(max_requests=2, slots=slots)
    runner = GraphRunner(step, buffers, GraphConfig(DecodePhase(Backend.FULL, Ladder.explicit([2])), lora_cases=(0, 4)))
    runner.capture()
    assert set(seen) == {0, 4}
    assert [int(runner(ids=[0], num_loras=n).output) for n in (0, 1, 4)] == [0, 4, 4]
    out = runner(ids=[0], num_loras=5)
    assert (out.reason, int(out.output)) == (Reason.TOO_MANY_LORAS, 5)


def test_a_graph_is_found_by_key_or_batch() -> None:
    runner = sums_runner(config("FULL"))
    assert runner.graph(3).key == BatchDescriptor.decode(4)
    assert runner.graph(BatchDescriptor.mixed(7, 2)).key == BatchDescriptor.relaxed(8)
    assert runner.graph(BatchDescriptor.relaxed(8)).key == BatchDescriptor.relaxed(8)
    assert any("searchsorted" in node.name for node in runner.graph_nodes(BatchDescriptor.mixed(7, 2)))


def test_what_breaks_cost_is_added_up_by_name(device) -> None:
    first = graph_break(lambda ids: ids * 2, name="first")
    second = graph_break(lambda ids: ids + 1, name="second")
    buffers = StaticBuffers(max_requests=8, max_tokens=32, slots=SLOTS[:1], device=device)
    runner = GraphRunner(lambda ids: second(first(ids) + first(ids)), buffers, config("PIECEWISE", query_lens=(1,)))
    runner.capture()
    assert runner.break_costs() == {"first": BreakTotal(0, 0.0), "second": BreakTotal(0, 0.0)}
    seconds = {"first": 0.0, "second": 0.0}
    batches = [(1, None), (8, None), (1, 2), (3, 7), (1, 32), (1, 32)]  # of five keys
    for steps, (requests, tokens) in enumerate(batches, start=1):
        assert runner(ids=[3] * (tokens or requests), num_requests=requests, num_tokens=tokens).mode is Mode.BREAKABLE
        costs = runner.break_costs()
        assert (costs["first"].calls, costs["second"].calls) == (2 * steps, steps)
        assert all(cost.host_seconds > seconds[name] for name, cost in costs.items())
        seconds = {name: cost.host_seconds for name, cost in costs.items()}
    assert max(seconds.values()) < 60
    runner.graph(2).recording.measure(2)
    assert runner.break_costs() == costs
    runner.release()
    assert runner.break_costs() == {}


def test_coverage_of_both_phases() -> None:
    runner = sums_runner(config("FULL"))
    assert [route.padded for route in runner.coverage()] == [2, 2, 4, 4, 8, 8, 8, 8]
    assert [route.padded for route in runner.coverage(query_len=2)] == [2, 2, 4, 4, 8, 8, 8, 8]
    mixed = runner.coverage_mixed()
    assert [route.real for route in mixed] == list(range(1, 33)) and mixed[8].padded == 32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"num_requests": 9}, "9 requests; the buffers hold 1 to 8"),
        ({"num_requests": 2, "num_tokens": 33}, "33 tokens of 2 requests"),
        ({"num_requests": 2, "num_tokens": 1}, "1 tokens of 2 requests; each has at least one"),
        ({"num_requests": 8, "query_len": 5}, "40 tokens of 8 requests"),
        ({"num_requests": 2, "query_len": 2, "num_tokens": 4}, "uniform or it is not"),
        ({"num_requests": 2, "query_len": 2.0}, "2.0 is not a whole number"),
        ({"num_requests": 2.0}, "2.0 is not a whole number"),
        ({"num_requests": "2"}, "'2' is not a whole number"),
        ({"num_requests": True}, "True is not a whole number"),
        ({"num_requests": 2, "num_tokens": 3.0}, "3.0 is not a whole number"),
        ({"num_requests": 2, "num_loras": 0.5}, "0.5 is not a whole number"),
        ({"num_requests": 2, "num_loras": -1}, "-1 adapters"),
        ({"num_requests": 2, "query_len": 0}, "0 tokens of 2 requests"),
    ],
)
def test_batches_that_are_none(call: dict, match: str) -> None:
    with pytest.raises(InputError, match=match):
        sums_runner(config("NONE"))(**call)


def test_numbers_may_be_numpys() -> None:
    out = sums_runner(config("FULL"))(num_requests=np.int64(2), num_tokens=np.int32(5))
    assert out.decision.batch == BatchDescriptor.mixed(5, 2) and type(out.real) is int


@pytest.mark.parametrize("query_len", [0, -1])
def test_coverage_of_no_tokens(query_len: int) -> None:
    with pytest.raises(InputError, match=f"query_len {query_len}: a request brings at least one token"):
        sums_runner(config("NONE")).coverage(query_len)


def test_what_does_not_fit_is_refused_before_the_capture() -> None:
    with pytest.raises(ConfigError, match="size 64 does not fit buffers of 32 tokens"):
        sums_runner(GraphConfig(prefill=PrefillPhase(Backend.FULL, Ladder.explicit([64]))))
    buffers = StaticBuffers(max_requests=1, slots=[Slot("num_tokens", torch.int32, "request", PaddingPolicy.ZERO)])
    with pytest.raises(ConfigError, match="slot num_tokens: a call of the runner has an argument of this name"):
        GraphRunner(lambda num_tokens: num_tokens, buffers, GraphConfig())
