"""The runner: what holds everywhere, on a step that is no language model."""

import copy
import gc
import random
import statistics
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from stepgraph.runtime import (
    ConfigError,
    GraphConfig,
    GraphRunner,
    InputError,
    Ladder,
    Mode,
    PaddingPolicy,
    Reason,
    ReplayError,
    Slot,
    StaticBuffers,
)

SLOTS = [
    Slot("ids", torch.int64, "request", PaddingPolicy.ZERO),
    Slot("lens", torch.int32, "request", PaddingPolicy.FILL_SENTINEL, pad_value=0),
    Slot("state", torch.float32, "request", PaddingPolicy.ZERO, (4,), owner="device"),
]
ABOVE = "the largest size of the ladder is 16; capture a size of at least"


class Table(torch.nn.Module):
    """A step with a weight, state that it advances, and rows that see only themselves."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(100, 4, generator=generator).to(device))

    def forward(self, ids: torch.Tensor, lens: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        alive = (lens > 0).unsqueeze(1)
        state.mul_(0.5).add_(self.table[ids] * alive)
        return {"score": state.sum(dim=1), "choice": state.argmax(dim=1)}


def make(device="cpu", max_requests=16, ladder: Ladder | None = None, mode="FULL_DECODE_ONLY", **config) -> GraphRunner:
    buffers = StaticBuffers(max_requests=max_requests, device=device, slots=SLOTS)
    ladder = ladder or Ladder.vllm(max_requests)
    runner = GraphRunner(Table(device), buffers, GraphConfig.preset(mode, ladder=ladder, **config))
    with torch.no_grad():
        runner.capture()
    return runner


def test_thirteen_rows_take_the_rung_of_sixteen(device) -> None:
    out = make(device)(ids=range(13), lens=[1] * 13)
    assert (out.mode, out.real, out.padded, out.reason) == (Mode.FULL, 13, 16, Reason.PADDED)
    assert out.score.shape == (13,) and out.choice.shape == (13,)


def test_replay_equals_eager_bit_for_bit_through_joins_and_leaves(device) -> None:
    """Rule 9, and no stale row: batches of every size in random order, state carried by the device."""
    rng = random.Random(1)
    graphs, eager = make(device), make(device, mode="NONE")
    for _ in range(300):
        size = rng.randint(1, 16)
        ids, lens = [rng.randrange(100) for _ in range(size)], [1] * size
        with torch.no_grad():
            replayed, expected = graphs(ids=ids, lens=lens), eager(ids=ids, lens=lens)
        assert torch.equal(replayed.score, expected.score) and torch.equal(replayed.choice, expected.choice)
        assert torch.equal(graphs.buffers["state"][:size], eager.buffers["state"][:size])
        assert graphs.buffers["state"][size:].eq(0).all()
    assert graphs.stats.by_mode() == {"FULL": 300} and graphs.stats.steps == 300


def test_rebinding_a_name_changes_nothing(device) -> None:
    """Rule 1."""
    held = {"table": torch.arange(100.0, device=device)}
    buffers = StaticBuffers(max_requests=4, device=device, slots=SLOTS[:1])
    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.vllm(4))
    runner = GraphRunner(lambda ids: held["table"][ids] * 2, buffers, config)
    runner.capture()
    old, held["table"] = held["table"], torch.zeros(100, device=device)
    assert runner(ids=[7]).output.tolist() == [14] and len(old) == 100


def test_an_output_is_borrowed_until_the_next_step(device) -> None:
    """Rule 2."""
    runner = make(device, debug="checks")
    first = runner(ids=[7, 8], lens=[1, 1])
    kept, value = first.clone(), first.score.tolist()
    runner(ids=[1] * 5, lens=[1] * 5)  # another size of the same pool
    with pytest.raises(ReplayError, match=r"step 1 made it and step 2 has overwritten it; clone\(\)"):
        first.score.tolist()
    assert kept.score.tolist() == value


def test_outputs_of_all_sizes_share_one_buffer(device) -> None:
    runner = make(device)
    addresses = {runner(ids=[1] * size, lens=[1] * size).score.data_ptr() for size in (1, 3, 9, 16)}
    assert len(addresses) == 1


def test_a_poisoned_tail_changes_no_real_row(device) -> None:
    """Rule 3: whatever the padded rows hold, the real ones come out the same."""
    runner = make(device)
    clean = runner(ids=range(5), lens=[1] * 5).score.clone()
    runner.buffers.reset()
    graph = runner.graph(5)
    runner.buffers["ids"][:5] = torch.arange(5)
    runner.buffers["lens"][:5] = 1
    runner.buffers["ids"][5:8] = 99
    runner.buffers["lens"][5:8] = 1
    runner.buffers["state"][5:8] = float("nan")
    graph.recording.replay()
    assert torch.equal(graph.outputs["score"][:5], clean)


def test_every_batch_has_a_known_route_before_the_first_request() -> None:
    """Rule 6."""
    runner = make(max_requests=20, ladder=Ladder.explicit([1, 2, 4, 8, 16]))
    routes = runner.coverage()
    assert [route.real for route in routes] == list(range(1, 21))
    assert [route.reason for route in routes[16:]] == [Reason.ABOVE_LADDER] * 4


def test_a_cliff_is_a_warning_at_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    """Rule 6."""
    make(max_requests=20, ladder=Ladder.explicit([1, 2, 4, 8, 16]))
    wanted = f"batches of 17 to 20 requests run eagerly (above_ladder): 20 requests; {ABOVE} 20"
    assert [record.message for record in caplog.records] == [wanted]


def test_a_batch_that_no_graph_runs_is_staged_at_its_own_size(device) -> None:
    """Rule 4: the decision comes first, and the tails follow it."""
    runner = make(device, max_requests=20, ladder=Ladder.explicit([16]))
    runner(ids=[9] * 20, lens=[1] * 20)
    runner(ids=[7] * 17, lens=[1] * 17)
    assert runner.buffers["ids"].tolist() == [7] * 17 + [9] * 3  # no tail: 17 rows run as 17
    runner(ids=[5] * 3, lens=[1] * 3)
    assert runner.buffers["ids"][:16].tolist() == [5] * 3 + [0] * 13


def test_no_fallback_without_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Rule 7: in the result, the statistics, and once in the log."""
    runner = make(max_requests=20, ladder=Ladder.explicit([1, 2, 4, 8, 16]))
    caplog.clear()
    runner(ids=range(18), lens=[1] * 18)
    out = runner(ids=range(17), lens=[1] * 17)
    assert (out.mode, out.padded, out.reason) == (Mode.EAGER, 17, Reason.ABOVE_LADDER)
    assert out.decision.detail == f"17 requests; {ABOVE} 17"
    assert runner.stats.by_reason() == {"above_ladder": 2}
    logged = f"a step runs eagerly (above_ladder): 18 requests; {ABOVE} 18"
    assert [record.message for record in caplog.records] == [logged]


def test_disabled_graphs_run_the_same_step(device) -> None:
    out = make(device, mode="NONE")(ids=[3], lens=[1])
    assert (out.mode, out.padded, out.reason) == (Mode.EAGER, 1, Reason.DISABLED)


def test_a_batch_size_without_inputs(device) -> None:
    runner = make(device)
    runner(ids=range(5), lens=[1] * 5)
    assert runner(num_requests=5).real == 5
    with pytest.raises(InputError, match="pass num_requests"):
        runner()
    with pytest.raises(InputError, match="the buffers hold 1 to 16"):
        runner(num_requests=17)
    with pytest.raises(InputError, match="the buffers hold 1 to 16"):
        runner(ids=[], lens=[])


@pytest.mark.parametrize("compiler", ["off", "aot_eager"])
def test_a_runner_that_nobody_holds_goes_at_once(compiler: str) -> None:
    """And so does the memory of its graphs and its step, which on a GPU the next engine may need."""
    gc.collect()
    gc.disable()
    try:
        runner = make(compile=compiler)
        runner(ids=range(3), lens=[1] * 3)
        gone = weakref.ref(runner)
        del runner
        assert gone() is None
    finally:
        gc.enable()


def test_a_ladder_larger_than_the_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match="size 32 does not fit buffers of 16"):
        make(ladder=Ladder.vllm(32))


def test_outputs_can_be_copied_by_pythons_own_means() -> None:
    out = make()(ids=[1], lens=[1])
    assert copy.copy(out).padded == 1


def test_one_value_is_no_batch() -> None:
    for value in (5, torch.tensor(5)):
        with pytest.raises(InputError, match="slot ids: one value is no batch"):
            make()(ids=value, lens=[1])


def test_an_output_that_the_step_did_not_return_is_named() -> None:
    with pytest.raises(AttributeError, match="returned score, choice; there is no 'tokens'"):
        _ = make()(ids=[1], lens=[1]).tokens


def test_random_steps_advance(device) -> None:
    """Rule 8, for steps that use torch's generator."""
    buffers = StaticBuffers(max_requests=4, device=device, slots=SLOTS[:1])
    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.vllm(4))
    runner = GraphRunner(lambda ids: ids + torch.rand(len(ids), device=ids.device), buffers, config)
    runner.capture()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([runner(ids=[0] * 4).output.tolist() for _ in range(3)])
    assert draws[0] == draws[1] and draws[0][0] != draws[0][1]


@pytest.mark.gpu
@pytest.mark.alone
def test_the_call_is_cheap_on_the_host() -> None:
    """At most 60 µs for the whole call and 12 for the launch, 13 rows: medians of the best round.

    The host is shared and its speed changes by twice while this runs. What is slow every time is ours.
    """
    runner = make("cuda")
    recording = runner.graph(13).recording
    ids, lens = list(range(13)), [1] * 13
    calls = rounds_us(lambda: runner(ids=ids, lens=lens))
    launches = rounds_us(recording.replay)
    host = rounds_us(lambda: sum(range(1000)))
    said = f"µs a round: calls {calls}, launches {launches}; the host adds up a thousand numbers in {host}"
    assert min(calls) < 60 and min(launches) < 12, said


def rounds_us(call: Callable[[], object], rounds: int = 20, count: int = 50) -> list[float]:
    """The median of each round, µs on the host; the device idles when a call begins."""
    medians = []
    for _ in range(rounds):
        taken = []
        for _ in range(count):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        medians.append(round(statistics.median(taken) * 1e6, 1))
    return medians


def once_more(runner: GraphRunner, size: int = 3) -> list[float]:
    """What a call of no inputs gives from here on, of a runner like this one."""
    return runner(num_requests=size).score.tolist()


def test_the_same_batch_again_is_a_call_without_inputs(device) -> None:
    again, called = make(device), make(device)
    for runner in (again, called):
        runner(ids=[1, 2, 3], lens=[1] * 3)
    for _ in range(5):
        out = again.again()
        assert out.score.tolist() == once_more(called) and out.score.shape == (3,)
        assert (out.mode, out.real, out.padded, out.reason) == (Mode.FULL, 3, 4, Reason.PADDED)
    assert again.stats.as_dict() == called.stats.as_dict()


CHANGES: dict[str, Callable[[GraphRunner], object]] = {
    "other inputs": lambda runner: runner(ids=[7, 8, 9], lens=[1] * 3),
    "a patch": lambda runner: runner.buffers.patch([1], state=[[1.0, 2.0, 3.0, 4.0]]),
    "inputs staged past the runner": lambda runner: runner.buffers.stage(*runner.buffers.staged, {"ids": [9, 9, 9]}),
    "another batch and back": lambda runner: (runner(ids=range(9), lens=[1] * 9), runner(ids=[1] * 3, lens=[1] * 3)),
    "an eager batch and back": lambda runner: (runner(num_requests=16), runner(num_requests=3)),
    "graphs captured anew": lambda runner: (runner.recapture(), runner(ids=[4, 5, 6], lens=[1] * 3)),
    "no graphs": lambda runner: (runner.release(), runner(ids=[4, 5, 6], lens=[1] * 3)),
    "verified": lambda runner: runner.verify(batches_per_key=1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_not_overlooked(change: Callable[[GraphRunner], object], device) -> None:
    again, called = make(device, ladder=Ladder.explicit([4, 12])), make(device, ladder=Ladder.explicit([4, 12]))
    for runner in (again, called):
        runner(ids=[1, 2, 3], lens=[1] * 3)
    for _ in range(2):
        again.again(), once_more(called)
    for runner in (again, called):
        with torch.no_grad():
            change(runner)
    for _ in range(3):
        with torch.no_grad():
            out, want = again.again(), called(num_requests=3)
        assert out.score.tolist() == want.score.tolist() and (out.mode, out.reason) == (want.mode, want.reason)
    assert again.stats.as_dict() == called.stats.as_dict()


def test_another_batch_is_the_one_that_is_run_again(device) -> None:
    runner = make(device)
    runner(ids=[1, 2, 3], lens=[1] * 3)
    runner.again()
    for size in (9, 3, 16):
        runner(num_requests=size)
        assert [runner.again().score.shape for _ in range(3)] == [(size,)] * 3


def test_there_is_nothing_to_run_again(device) -> None:
    runner = make(device)
    for _ in range(2):
        with pytest.raises(InputError, match="again: nothing is staged since the buffers were reset"):
            runner.again()
        runner(ids=[1], lens=[1])
        runner.again()
        runner.buffers.reset()


def test_what_is_needed_with_every_step_is_needed_again(device) -> None:
    slots = [Slot("x", torch.float32, "request", PaddingPolicy.FOREACH_COPY)]
    runner = GraphRunner(
        lambda x: x * 2,
        StaticBuffers(max_requests=2, device=device, slots=slots),
        GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2])),
    )
    runner.capture()
    runner(x=[1.0, 2.0])
    with pytest.raises(InputError, match="slot x: FOREACH_COPY needs it with every step"):
        runner.again()


def test_a_moved_weight_is_found_by_running_again(device) -> None:
    runner = make(device)
    runner(ids=[1, 2, 3], lens=[1] * 3)
    runner.again()
    state = {"cache": torch.zeros(4, device=device)}
    runner.watch(state, "late")  # from the next step on
    state["cache"] = torch.zeros(4, device=device)
    with pytest.raises(ReplayError, match=r"moved since the capture: late\.cache from"):
        for _ in range(10):
            runner.again()


def test_an_error_of_running_again_gives_the_turn_back(device, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(device)
    runner(ids=[1, 2, 3], lens=[1] * 3)
    runner.again()

    def interrupted() -> None:
        with pytest.raises(ReplayError, match="from inside its own step"):
            runner.again()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.again()
    monkeypatch.undo()
    assert runner.again().real == 3


def test_graphs_that_are_released_are_not_kept_for_running_again(device) -> None:
    runner = make(device)
    runner(ids=[1, 2, 3], lens=[1] * 3)
    kept = weakref.ref(runner.again().score)
    assert kept() is runner.again().score
    runner.release()
    assert kept() is None
