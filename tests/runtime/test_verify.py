"""Finding a wrong replay: what is right passes, and each planted fault is found by name."""

import random

import pytest
import torch
from runtime.sums import MAX_REQUESTS, MAX_TOKENS, add_rows, sums_runner

from stepgraph.runtime import (
    CaptureError,
    ConfigError,
    GraphConfig,
    GraphRunner,
    InputError,
    Ladder,
    PaddingPolicy,
    Slot,
    StaticBuffers,
    graph_break,
    opaque,
    region,
)
from stepgraph.runtime.verify import FaultKind, VerifyReport

ROWS = 8
X = Slot("x", torch.float32, "request", PaddingPolicy.ZERO, (4,))


def runner_of(
    step, slots=(X,), device="cpu", mode="FULL_DECODE_ONLY", sizes=(2, ROWS), state=None, **kwargs
) -> GraphRunner:
    buffers = StaticBuffers(max_requests=ROWS, slots=slots, device=device)
    ladder = Ladder.explicit(sizes)
    config = GraphConfig.preset(mode, ladder=ladder, prefill_ladder=ladder if "PIECE" in mode else None, **kwargs)
    runner = GraphRunner(step, buffers, config, state=state)
    runner.capture()
    return runner


def only_fault(report: VerifyReport, kind: FaultKind) -> str:
    """The text of the faults, which are all of one kind."""
    assert {fault.kind for fault in report.faults} == {kind}, str(report)
    return str(report.faults[0])


def draw(batch, generator: torch.Generator) -> dict:
    rng = random.Random(int(torch.randint(1 << 30, (), generator=generator)))
    lens = [batch.query_len or 1] * batch.num_reqs
    for _ in range(batch.num_tokens - sum(lens)):
        lens[rng.randrange(len(lens))] += 1
    ids = [rng.randrange(100) for _ in range(batch.num_tokens)]
    return {"ids": ids, "query_lens": lens, "total": torch.randint(100, (batch.num_reqs,), generator=generator) / 8}


# What is right


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("debug", ["off", "eager-through-graph", "break-every-op"])
def test_a_right_runner_passes(device, mode: str, debug: str) -> None:
    ladders = {"ladder": Ladder.explicit([2, MAX_REQUESTS]), "prefill_ladder": Ladder.explicit([4, MAX_TOKENS])}
    runner = sums_runner(GraphConfig.preset(mode, query_lens=(1, 2), debug=debug, **ladders), device)
    report = runner.verify(draw)
    assert report.ok, str(report)
    assert len(report.keys) == 6 and all(key.batches == 3 for key in report.keys)
    assert report.as_dict()["ok"] and "3 batches as in eager" in str(report)


def test_progress_names_each_key(device) -> None:
    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2, MAX_REQUESTS]))
    told: list[tuple[int, int, str]] = []
    sums_runner(config, device).verify(draw, progress=lambda *what: told.append(what))
    assert [done for done, _, _ in told] == [0, 1, 2] and {total for _, total, _ in told} == {2}
    assert {"2 requests", f"{MAX_REQUESTS} requests"} <= {what for _, _, what in told}


def test_buffers_and_state_are_put_back(device) -> None:
    kv = torch.arange(10.0, device=device)

    def step(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        kv.add_(x.sum())
        return own.add_(1) * 2

    slots = [X, Slot("own", torch.float32, "request", PaddingPolicy.ZERO, owner="device")]
    runner = runner_of(step, slots, device, state={"kv": kv})
    runner(x=torch.ones(3, 4), own=[1.0, 2.0, 3.0])
    kv_before, slab_before = kv.clone(), runner.buffers.slab.clone()
    torch.manual_seed(5)
    random_before = torch.random.get_rng_state()
    assert runner.verify().ok
    assert torch.equal(kv, kv_before) and torch.equal(runner.buffers.slab, slab_before)
    assert torch.equal(torch.random.get_rng_state(), random_before)
    out = runner(num_requests=3)  # goes on where it was
    assert out.output.tolist() == [6.0, 8.0, 10.0]


def test_random_steps_pass(device) -> None:
    assert runner_of(lambda x: x + torch.rand_like(x), device=device).verify().ok


def test_nothing_captured_is_nothing_verified() -> None:
    runner = runner_of(lambda x: x + 1, mode="NONE")
    with pytest.raises(CaptureError, match="nothing to verify"):
        runner.verify()
    with pytest.raises(InputError, match="0 batches"):
        runner.verify(batches_per_key=0)


def test_what_verify_cannot_work_with() -> None:
    runner = runner_of(lambda x: x + 1)
    for wrong in (-1e-3, float("nan"), "1"):
        with pytest.raises(ConfigError, match="rtol .* must be a number of at least 0"):
            runner.verify(rtol=wrong)
        with pytest.raises(ConfigError, match="atol"):
            runner.verify(atol=wrong)
    with pytest.raises(InputError, match="make_inputs returned NoneType"):
        runner.verify(lambda batch, generator: None)
    with pytest.raises(InputError, match="slot x: "):
        runner.verify(lambda batch, generator: {"x": [1.0]})
    assert runner(x=torch.ones(2, 4)).output.eq(2).all()


def test_within_a_tolerance(device) -> None:
    held = {"scale": 1.0}
    runner = runner_of(lambda x: x * held["scale"], device=device)
    held["scale"] = 1 + 1e-4
    assert not runner.verify().ok and not runner.verify(rtol=1e-5).ok
    assert runner.verify(rtol=1e-3).ok


# Planted faults


def test_a_rebound_weight(device) -> None:
    weights = {"w": torch.eye(4, device=device)}

    def step(x: torch.Tensor) -> torch.Tensor:
        with region("project"):
            return (x + 1) @ weights["w"] - 1

    runner = runner_of(step, device=device)
    weights["w"] = weights["w"] * 3
    fault = only_fault(runner.verify(), FaultKind.RECORDING)
    if device.type == "cpu":
        assert "first operator that differs: aten.mm.default in project" in fault
        assert "test_verify.py" in fault and 'return (x + 1) @ weights["w"] - 1' in fault
        assert "input 1 differs already: eager float32 [4, 4] from 0 to 3; replay float32 [4, 4] from 0 to 1" in fault
    else:
        assert "what the recording reads has moved" in fault


def test_a_rebound_weight_that_is_watched_is_named_too(device) -> None:
    weights = {"w": torch.eye(4, device=device)}
    runner = runner_of(lambda x: x @ weights["w"], device=device)
    runner.watch(weights, "weights")
    weights["w"] = weights["w"] * 3
    assert "moved since the capture: weights.w" in only_fault(runner.verify(), FaultKind.RECORDING)


def rows_slot(pad: PaddingPolicy) -> Slot:
    return Slot("rows", torch.int64, "request", pad)


def place_rows(batch, generator: torch.Generator) -> dict:
    """Each request has a row of its own, from 1 on."""
    rows = torch.randperm(ROWS, generator=generator)[: batch.num_reqs] + 1
    return {"rows": rows, "x": torch.randn(batch.num_reqs, 4, generator=generator)}


def test_a_stale_index_tail(device) -> None:
    def pooled(pad: PaddingPolicy) -> GraphRunner:
        def step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            counts = torch.zeros(ROWS + 1, device=x.device)
            counts.index_add_(0, rows, torch.ones_like(rows, dtype=torch.float32))
            return x / counts[rows].unsqueeze(1)

        return runner_of(step, [X, rows_slot(pad)], device)

    assert pooled(PaddingPolicy.ZERO).verify(place_rows).ok
    fault = only_fault(pooled(PaddingPolicy.KEEP_PAD).verify(place_rows), FaultKind.PADDING)
    assert "by the padded rows of slot rows (KEEP_PAD)" in fault
    assert "first operator that differs: aten.index_add_.default" in fault and "counts.index_add_(0, rows" in fault


@pytest.mark.parametrize("pad", [PaddingPolicy.KEEP_PAD, PaddingPolicy.FOREACH_COPY])
def test_padded_rows_that_write_real_kv(device, pad: PaddingPolicy) -> None:
    kv = torch.randn(ROWS + 1, 4, device=device)  # row 0 is nobody's; zeros would hide that zeros are written

    def step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kv[rows] = x
        return x * 2

    runner = runner_of(step, [X, rows_slot(PaddingPolicy.ZERO)], device, state={"kv": kv[1:]})
    assert runner.verify(place_rows).ok
    runner = runner_of(step, [X, rows_slot(pad)], device, state={"kv": kv[1:]})
    fault = only_fault(runner.verify(place_rows), FaultKind.PADDING)
    assert "state kv: " in fault and f"by the padded rows of slot rows ({pad.name})" in fault
    assert "first operator that differs: aten.index_put_.default" in fault and "kv[rows] = x" in fault


def test_padded_rows_that_lose_every_race(device) -> None:
    """Where a padded row and a real one write the same place, the real one may be the last: the fault is found all the
    same, by a place that is nobody's in the batch."""
    kv = torch.randn(ROWS + 1, 4, device=device)

    def step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for row in range(len(x) - 1, -1, -1):
            kv.index_copy_(0, rows[row : row + 1], x[row : row + 1])
        return x * 2

    runner = runner_of(step, [X, rows_slot(PaddingPolicy.KEEP_PAD)], device, state={"kv": kv[1:]})
    fault = only_fault(runner.verify(place_rows), FaultKind.PADDING)
    assert "state kv: " in fault and "by the padded rows of slot rows (KEEP_PAD)" in fault


def test_a_tail_that_is_read(device) -> None:
    slots = [X, Slot("w", torch.float32, "request", PaddingPolicy.KEEP_PAD)]
    runner = runner_of(lambda x, w: x * w.sum(), slots, device)
    fault = only_fault(runner.verify(), FaultKind.PADDING)
    assert "by the padded rows of slot w (KEEP_PAD)" in fault and "NaN" in fault and "aten.sum" in fault


def test_real_rows_that_see_padded_ones(device) -> None:
    """Without any slot to blame: zeros count in a mean."""
    runner = runner_of(lambda x: x - x.mean(0), device=device)
    fault = only_fault(runner.verify(), FaultKind.PADDING)
    assert "first operator that differs: aten.mean.dim" in fault and "slot" not in fault


def test_an_undecorated_break(device) -> None:
    """It reads a value that Python keeps, which the recording took for good."""
    served = {"bias": 1.0}

    def adjust(x: torch.Tensor) -> torch.Tensor:
        return x + served["bias"]

    def make(adjusting) -> GraphRunner:
        return runner_of(lambda x: adjusting(x * 2).relu(), device=device, mode="PIECEWISE")

    good, bad = make(graph_break(adjust)), make(adjust)
    served["bias"] = 2.0
    assert good.verify().ok
    fault = only_fault(bad.verify(), FaultKind.RECORDING)
    if device.type == "cpu":
        assert "first operator that differs: aten.add.Tensor" in fault
        assert 'in adjust: return x + served["bias"]' in fault
        assert "input 1 differs already: eager 2.0; replay 1.0" in fault
    else:
        assert "has moved or changed since the capture" in fault


def test_another_path_than_at_the_capture(device) -> None:
    served = {"gelu": False}

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) if served["gelu"] else x.relu()

    runner = runner_of(step, device=device)
    served["gelu"] = True
    fault = only_fault(runner.verify(), FaultKind.RECORDING)
    if device.type == "cpu":
        assert "eager calls aten.gelu.default at test_verify.py" in fault and "replay has aten.relu.default" in fault


def test_a_hidden_fresh_output_of_a_break(device) -> None:
    """The tape refuses to record it and says where; elsewhere the replay goes on reading the first one."""
    held = {}

    @graph_break
    def look_up(x: torch.Tensor) -> None:
        held["rows"] = x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        look_up(x)
        return held["rows"] + 1

    if device.type == "cpu":
        with pytest.raises(CaptureError, match=r"reads a tensor that break .*look_up .* makes without returning it"):
            runner_of(step, mode="PIECEWISE")
    else:
        runner = runner_of(step, device=device, mode="PIECEWISE")
        assert "aten.add.Tensor" in only_fault(runner.verify(), FaultKind.RECORDING)


@pytest.mark.parametrize("drawn", ["python", "torch"])
def test_random_numbers_that_do_not_advance(device, drawn: str) -> None:
    """A value that is drawn at the capture and baked in."""

    def draw_scale() -> float:
        return random.random() if drawn == "python" else float(torch.initial_seed() % 97)

    runner = runner_of(lambda x: x * draw_scale(), device=device)
    fault = only_fault(runner.verify(), FaultKind.RANDOM)
    assert fault.startswith("RNG does not advance")
    assert "first operator that differs: aten.mul.Tensor" in fault and "x * draw_scale()" in fault


def test_a_generator_that_nobody_can_rewind() -> None:
    own = random.Random(1)
    runner = runner_of(lambda x: x * own.random())
    assert "aten.mul.Tensor" in only_fault(runner.verify(), FaultKind.RANDOM)

    @opaque
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * own.random()

    assert "x * own.random()" in only_fault(runner_of(scaled).verify(), FaultKind.UNREPEATABLE)


def test_what_depends_on_the_keys_before_it(device) -> None:
    """A key that reads what another one has left."""
    left = torch.zeros((), device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            return x + left
        left.copy_(x[0, 0])
        return x + 1

    runner = runner_of(step, device=device, sizes=(1, ROWS))
    fault = only_fault(runner.verify(batches_per_key=2), FaultKind.LATER)
    assert "the replay is another one after other keys have run" in fault


def test_whole_numbers_hide_nothing_on_the_tape() -> None:
    """A weight that has moved is found before it changes a choice."""
    weights = {"w": torch.eye(4)}
    runner = runner_of(lambda x: (x @ weights["w"]).argmax(1))
    assert runner.verify().ok
    weights["w"] = weights["w"] * 1.0001
    fault = only_fault(runner.verify(), FaultKind.RECORDING)
    assert "not what it computes on the way" in fault and "first operator that differs: aten.mm.default" in fault


def test_the_report_as_a_dictionary() -> None:
    runner = runner_of(lambda x: x - x.mean(0))
    report = runner.verify().as_dict()
    assert report["ok"] is False
    key = report["keys"][0]
    assert (key["key"], key["mode"]) == ("8 requests", "FULL") and key["faults"][0]["kind"] == "padding"


def test_add_rows_itself() -> None:
    total = add_rows(torch.zeros(3), torch.ones(6), torch.tensor([2, 3, 0]))
    assert total.tolist() == [2, 3, 0]
