"""From traces to the account: rows that add up, figures with definitions, what the verdict says, the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from measure.fake_cuda import fake_cuda
from measure.traces import eager_step, graph_step

from stepgraph.measure.account import WARM, Accounted, Way, account
from stepgraph.measure.account_result import account_result, draw, waterfall_rows
from stepgraph.measure.stamps import CrossCheck, Stamped, cross_check
from stepgraph.measure.trace.kineto import TraceError, parse_events
from stepgraph.measure.trace.steps import split_steps
from stepgraph.measure.trace.waterfall import lasting_gaps, waterfall
from stepgraph.measure.work import Floor
from stepgraph.runtime.errors import ConfigError

FLOOR = Floor(read=20, compute=2, total=21, bound_by_compute=1)


def accounted(name: str = "graph", count: int = 12, **how: float) -> Accounted:
    make = graph_step if name == "graph" else eager_step
    events = [event for i in range(count) for event in make(1000.0 * i, 100 * i, **how)]
    steps = [waterfall(step) for step in split_steps(parse_events(events))]
    return Accounted(name, steps, profiled=[43.2] * count, plain=[40.0 + i / 10 for i in range(count)])


def test_the_rows_add_up_to_the_events_time() -> None:
    rows = waterfall_rows(accounted(), FLOOR)
    assert rows == {
        "reading": 20,
        "arithmetic": 1,
        "kernels beyond": pytest.approx(7),
        "gaps, device": pytest.approx(1),
        "gaps, host": 0,
        "before the first": pytest.approx(14),
        "the profiler's own": 0,
        "residual": pytest.approx(0.2),
    }
    assert sum(rows.values()) == pytest.approx(43.2)


def test_every_figure_has_a_definition_and_the_residual_is_said() -> None:
    check = CrossCheck(plain=[28.0] * 12, profiled=[29.0] * 12, traced=[29.0] * 12)
    result = account_result("A step", [accounted("eager"), accounted()], floor=FLOOR, check=check)
    assert all(figure.definition for figure in result.figures)
    by_name = {figure.name: figure for figure in result.figures}
    assert by_name["graph: overlap"].median == pytest.approx(2)
    assert by_name["graph: host budget"].median == pytest.approx(28 / 3)
    assert by_name["graph: dilation"].median == pytest.approx(43.2 / 40.55, rel=1e-3)
    assert by_name["graph: launches"].median == 1 and by_name["eager: launches"].median == 3
    notes = "\n".join(result.notes)
    assert "graph: residual +0.46% of the step, within 1%" in notes
    assert "eager: residual -29.63% of the step, BEYOND 1%" in notes
    assert "eager / graph, in turns" in notes and "the clock read inside it, the same steps: 1.000" in notes
    assert "proves nothing" in " ".join(notes.split())
    table = result.tables[0]
    assert [row[0] for row in table.rows][-1] == "in all" and table.rows[-1][3] == pytest.approx(43.2)
    assert result.to_json()["verdicts"]["graph"]["bound"] == "reading"


def test_without_events_or_a_floor() -> None:
    found = Accounted("trace", accounted().steps)
    result = account_result("A trace", [found])
    assert found.residual is None and "reading" not in waterfall_rows(found, None)
    assert result.to_json()["verdicts"]["trace"]["bound"] == "something else"
    assert [row[0] for row in result.tables[0].rows] == [
        "kernels", "gaps, device", "gaps, host", "before the first", "in all"
    ]  # fmt: skip


def test_planted_stalls_and_breaks_are_named() -> None:
    (stall,) = accounted("eager", stall=200).verdict(FLOOR).findings
    assert stall.startswith("host stall: 215 of 256 µs")
    (idle,) = accounted("graph", idle=100).verdict(FLOOR).findings
    assert idle.startswith("idle break: 101 of 143 µs (71%) after first and before second")
    (late,) = accounted("eager", host_gap=100).verdict(FLOOR).findings
    assert late.startswith("idle break: 110 of 156 µs") and "the host had launched nothing" in late


def test_a_hiccup_of_one_step_is_no_break() -> None:
    steady, once = accounted(count=5), accounted(count=1, idle=500)
    assert lasting_gaps([*steady.steps, *once.steps])[0].us == pytest.approx(1)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waterfall.png"
    draw(path, [accounted("eager"), accounted()], FLOOR, "A step")
    assert path.stat().st_size > 5000


def test_a_timeline_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        account([Way("graph", lambda: math.pi, lambda: None)], 3)


def test_each_step_starts_with_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch)
    way = Way("graph", lambda: log.append("step"), lambda: log.append("before"))
    (found,) = account([way], 4)
    assert log[:7] == ["before", "sync", "sync", "sync", "step", "sync", "sync"]
    assert len(found.steps) == len(found.profiled) == len(found.plain) == 4
    assert found.profiled[0] == pytest.approx(43.4) and found.median("total") == pytest.approx(43)
    assert found.residual == pytest.approx(0.4)


def test_what_the_profiler_adds_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch, plain_us=33.4)
    (found,) = account([Way("graph", lambda: log.append("step"), lambda: None)], 4)
    assert found.profiled[0] == pytest.approx(43.4) and found.plain[0] == pytest.approx(33.4)
    rows = waterfall_rows(found, None)
    assert rows["before the first"] == pytest.approx(4) and rows["the profiler's own"] == pytest.approx(10)
    assert rows["residual"] == pytest.approx(0.4) and sum(rows.values()) == pytest.approx(43.4)
    assert found.median("total") == pytest.approx(33)
    monkeypatch.undo()  # the result names the machine
    result = account_result("A step", [found])
    by_name = {figure.name: figure.median for figure in result.figures}
    assert by_name["graph: the profiler's own"] == pytest.approx(10)
    assert by_name["graph: dilation"] == pytest.approx(43.4 / 33.4)


def test_two_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch)
    turns: list[str] = []

    def way(name: str) -> Way:
        return Way(name, lambda: log.append("step"), lambda: turns.append(name))

    account([way("a"), way("b")], 2)
    assert turns[: 2 * WARM] == ["a"] * WARM + ["b"] * WARM
    assert turns[2 * WARM : 2 * WARM + 4] == ["a", "b", "b", "a"]


def test_steps_that_the_profiler_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch, lost=1)
    with pytest.raises(TraceError, match="graph: the profiler's trace holds 6 of 7 steps"):
        account([Way("graph", lambda: log.append("step"), lambda: None)], 4)


def test_the_clock_inside_is_read_once_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_cuda(monkeypatch)

    class Clock(Stamped):
        def __init__(self) -> None:
            pass

        def read_us(self) -> float:
            return float(log.count("step"))

    check = cross_check(Clock(), lambda: log.append("step"), lambda: None, 4)
    assert check.plain == [4, 5, 6, 7] and check.profiled == [11, 12, 13, 14]
    assert list(check.traced) == [pytest.approx(29)] * 4
