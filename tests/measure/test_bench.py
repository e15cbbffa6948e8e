"""Graphs on and off, one engine at a time."""

import time

import pytest
import torch
from engine.tiny import tiny_model

from stepgraph.measure.bench import Run, TimedRunner, Workload, bench, bench_result, run_engine
from stepgraph.runtime import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORK = Workload(rows=3, prompt=20, tokens=5, rounds=3)


def test_both_kinds_run_in_turns_and_say_how_they_ran() -> None:
    result = bench(tiny_model(DEVICE), WORK, "FULL_DECODE_ONLY")
    figures = {figure.name: figure for figure in result.figures}
    for kind in ("graphs", "eager"):
        assert len(figures[f"{kind}: per token"].samples) == 15
        assert all((f"{kind}: {apart}" in figures) is (DEVICE == "cuda") for apart in ("host", "device"))
    assert len(figures["eager / graphs"].samples) == 3
    told = result.to_json()["resolved"]
    assert told["graphs"]["steps"] == {"FULL": 5} and told["eager"]["steps"] == {"EAGER": 5}
    assert (told["graphs"]["decode"], told["graphs"]["graphs"], told["eager"]["decode"]) == ("full", 1, "disabled")
    assert any("Without a GPU" in note for note in result.notes) is (DEVICE == "cpu")


def test_an_engine_is_torn_down_and_the_next_does_the_same() -> None:
    model = tiny_model(DEVICE)
    first, second = (run_engine(model, WORK, "full") for _ in range(2))
    assert first.resolved["steps"] == second.resolved["steps"] == {"FULL": 5}
    assert first.resolved["prefill"] == "full"
    assert len(first.token) == len(first.host) == 5
    assert all(0 < host <= token for host, token in zip(first.host, first.token, strict=True))


def test_the_first_request_has_room_while_the_last_ones_prefill() -> None:
    work = Workload(rows=8, prompt=150, tokens=3, rounds=1)  # three steps of prefill
    assert run_engine(tiny_model(DEVICE), work, "FULL_DECODE_ONLY").resolved["steps"] == {"FULL": 3}
    assert work.longest < 200


def test_the_ratio_is_that_of_the_rounds() -> None:
    runs = {"graphs": [Run([2.0], [1.0]), Run([4.0], [1.0])], "eager": [Run([6.0], [6.0]), Run([8.0], [8.0])]}
    for made in runs.values():
        for run in made:
            run.resolved = {"steps": {"FULL": 1}}
    result = bench_result(runs, [(2.0, 6.0), (4.0, 8.0)], WORK, tiny_model())
    figures = {figure.name: figure for figure in result.figures}
    assert list(figures["eager / graphs"].samples) == [3.0, 2.0]
    assert list(figures["graphs: per token"].samples) == [2.0, 4.0]


def test_a_timed_runner_is_otherwise_the_runner() -> None:
    class Fake:
        class buffers:
            device = torch.device("cpu")

        config = "its own"

        def __call__(self, **call: int) -> int:
            return call["num_requests"] + 1

    timed = TimedRunner(Fake())  # type: ignore[arg-type]
    assert timed(num_requests=3) == 4 and timed.config == "its own" and timed.waited == [0.0]


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_sizes_start_at_one(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="all start at 1"):
        Workload(*sizes)


def test_what_compares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="captures no decode step"):
        bench(tiny_model(DEVICE), WORK, "NONE")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_device_graphs_leave_the_host_idle() -> None:
    result = bench(tiny_model("cuda"), Workload(2, 20, 50, 2), "FULL_DECODE_ONLY")
    figures = {figure.name: figure.median for figure in result.figures}
    assert figures["graphs: host"] < figures["eager: host"]
    assert figures["graphs: device"] <= figures["graphs: per token"] * 1.05


def test_on_a_device_the_wait_and_the_devices_time_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")
            time.sleep(0.002)

    class Fake:
        class buffers:
            device = torch.device("cuda")

        def __call__(self, **call: int) -> str:
            log.append("step")
            return "output"

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    timed = TimedRunner(Fake())  # type: ignore[arg-type]
    assert timed(num_requests=3) == "output"
    assert log == ["record", "step", "record", "wait"]
    assert timed.waited[0] >= 0.002 and len(timed.events) == 1
