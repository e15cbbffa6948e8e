"""Lazy capture: serve at once, and record in gaps what the traffic asked for."""

from dataclasses import replace

import pytest
import torch
from runtime.sums import MAX_REQUESTS, MAX_TOKENS, SLOTS, Sums

from stepgraph.runtime import (
    Backend,
    BatchDescriptor,
    CaptureError,
    DecodePhase,
    GraphConfig,
    GraphRunner,
    InputError,
    Ladder,
    Mode,
    PrefillPhase,
    Reason,
    ReplayError,
    StaticBuffers,
)

CONFIG = GraphConfig(
    decode=DecodePhase(Backend.FULL, Ladder.explicit([1, 2, 4, 8])),
    prefill=PrefillPhase(Backend.FULL, Ladder.explicit([8, 16, 32])),
    lazy=True,
)


def lazy_runner(device: torch.device, config: GraphConfig = CONFIG) -> GraphRunner:
    buffers = StaticBuffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, slots=SLOTS, device=device)
    runner = GraphRunner(Sums(device), buffers, config)
    runner.capture()
    return runner


def decode(runner: GraphRunner, rows: int):
    return runner(ids=torch.ones(rows, dtype=torch.int64), query_lens=torch.ones(rows, dtype=torch.int32))


def test_at_first_the_largest_of_each_kind(device: torch.device) -> None:
    runner = lazy_runner(device)
    assert list(runner.capture_report.graphs) == [BatchDescriptor.relaxed(32), BatchDescriptor.decode(8)]
    assert runner.pending == [
        *(BatchDescriptor.relaxed(n) for n in (16, 8)),
        *(BatchDescriptor.decode(n) for n in (4, 2, 1)),
    ]
    assert decode(runner, 8).mode is Mode.FULL
    waiting = decode(runner, 3)
    assert (
        waiting.mode is Mode.EAGER and waiting.reason is Reason.PENDING and "capture_pending" in waiting.decision.detail
    )


def test_what_most_steps_wanted_comes_first(device: torch.device) -> None:
    runner = lazy_runner(device)
    for rows in (2, 2, 1, 2, 1, 4):
        decode(runner, rows)
    assert [key.num_reqs for key in runner.pending[:3]] == [2, 1, 4]
    report = runner.capture_pending(seconds=0)
    assert list(report.graphs) == [BatchDescriptor.decode(2)]
    assert decode(runner, 2).reason is Reason.EXACT and decode(runner, 1).reason is Reason.PENDING
    runner.capture_pending()
    assert runner.pending == [] and len(runner.capture_report.graphs) == 7
    assert all(route.mode is Mode.FULL for route in runner.coverage() + runner.coverage_mixed())
    assert runner.capture_pending().graphs == {}


def test_requests_go_on_over_a_gap(device: torch.device) -> None:
    """What rows had summed up before the gap is there behind it."""
    runner, eager = lazy_runner(device), lazy_runner(device, GraphConfig())
    for gap in (False, True, False):
        if gap:
            runner.capture_pending()
        assert decode(runner, 3).total.tolist() == decode(eager, 3).total.tolist()


def test_running_again_takes_the_graph_that_a_gap_has_left(device: torch.device) -> None:
    runner = lazy_runner(device)
    decode(runner, 3)
    for _ in range(2):
        assert runner.again().reason is Reason.PENDING
    assert runner.pending[0] == BatchDescriptor.decode(4)  # each of the three is counted
    runner.capture_pending(seconds=0)
    assert [runner.again().reason for _ in range(3)] == [Reason.PADDED] * 3
    assert runner.stats.by_reason() == {"pending": 3, "padded": 3}


def test_the_same_guards_hold() -> None:
    runner = lazy_runner(torch.device("cpu"))
    inner = runner._run.step

    def step(**views):
        runner.capture_pending()
        return inner(**views)

    runner._run.step = step
    with pytest.raises(CaptureError, match="while a step runs"):
        decode(runner, 1)
    runner._run.step = inner
    weights = {"table": torch.ones(1)}
    runner.watch(weights)
    weights["table"] = torch.ones(1)
    with pytest.raises(ReplayError, match="table from"):
        runner.capture_pending()


@pytest.mark.parametrize("seconds", [float("nan"), "x"])
def test_seconds_are_a_number(seconds: object) -> None:
    runner = lazy_runner(torch.device("cpu"))
    with pytest.raises(InputError, match="no number of seconds"):
        runner.capture_pending(seconds)  # type: ignore[arg-type]
    assert len(runner.pending) == 5


def test_everything_at_once_leaves_nothing_pending() -> None:
    runner = lazy_runner(torch.device("cpu"), GraphConfig(decode=CONFIG.decode))
    assert runner.pending == [] and len(runner.capture_report.graphs) == 4


def test_the_plan_is_told_before_anything_is_captured() -> None:
    buffers = StaticBuffers(max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, slots=SLOTS)
    told: list[tuple[int, int, str]] = []
    GraphRunner(Sums("cpu"), buffers, CONFIG).capture(lambda *what: told.append(what))
    assert told[0] == (0, 2, "graphs: 3 prefill, 4 decode; 2 of them now, 5 in gaps")
    preset = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1, 2]), lazy=True)
    GraphRunner(Sums("cpu"), buffers, replace(preset, lazy=False)).capture(lambda *what: told.append(what))
    assert preset.lazy and told[3] != told[4] and (0, 2, "graphs: 2 decode") in told
