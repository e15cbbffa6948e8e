"""What the profiler adds is taken out: figures that an H200 gave, and where nothing may be taken."""

from __future__ import annotations

import pytest
from measure.traces import eager_step

from stepgraph.measure.account import Accounted
from stepgraph.measure.trace.dilation import without_profiler
from stepgraph.measure.trace.kineto import Activity, Call, parse_events
from stepgraph.measure.trace.steps import StepTrace, split_steps
from stepgraph.measure.trace.waterfall import StepWaterfall, waterfall
from stepgraph.measure.verdict import Bound
from stepgraph.measure.work import Floor

READS = Floor(read=3285, compute=10, total=3285, bound_by_compute=0)
NODES, INSIDE = 396, 4657.0
"""Of the graph of an 8B step, and µs from its first node's start to its last one's end."""


def graphs(*waits: float, nodes: int = NODES, inside: float = INSIDE) -> StepWaterfall:
    """Graphs one behind the other. waits: µs before each, all of them its launch's."""
    now, calls, activities = 0.0, [], []
    for key, wait in enumerate(waits, start=1):
        calls.append(Call("cudaGraphLaunch", now, now + wait - 1, 1, key))
        now += wait
        each = inside / nodes
        for node in range(nodes):
            start = now + node * each
            # The last one ends the graph; between the others the device idles for 0.3 µs.
            stop = start + each - (0.3 if node < nodes - 1 else 0)
            activities.append(Activity(f"kernel {node}", "kernel", start, stop, 0, 7, key, node))
        now += inside
    return waterfall(StepTrace(0.0, tuple(calls), tuple(activities), {}))


def accounted(step: StepWaterfall, plain: float) -> Accounted:
    """As `account` makes it of steps that events and the trace agree on."""
    return Accounted("graph", without_profiler([step] * 5, step.total - plain), [step.total] * 5, [plain] * 5)


def test_a_graph_under_the_profiler_reads_and_has_no_stall() -> None:
    step = graphs(406)
    assert step.total == pytest.approx(5063) and step.first_nodes == NODES
    before = Accounted("graph", [step]).verdict(READS)
    assert before.findings == ("host stall: 406 of 5,063 µs (8%) pass before the first kernel starts",)
    found = accounted(step, 4640)
    said = found.verdict(READS)
    assert said.bound is Bound.READING and "3,285 of 4,657 µs" in said.because and not said.findings
    assert found.median("profiler") == pytest.approx(406)  # of 423: no wait becomes less than none
    assert found.residual == pytest.approx(0)


@pytest.mark.parametrize(
    ("first", "total", "plain", "left"), [(644, 5307, 4704 + 200, 241), (602, 5253, 4640 + 200, 189)]
)
def test_a_planted_host_stall_keeps_what_is_its_own(first: float, total: float, plain: float, left: float) -> None:
    """plain: of the step without the fault, and the fault. That is not to the microsecond: the profiler also stretches
    the graph itself, by less than a hundredth, and that is taken from the wait too."""
    step = graphs(first, inside=total - first)
    assert step.total == pytest.approx(total)
    (finding,) = accounted(step, plain).verdict(READS).findings
    assert finding.startswith(f"host stall: {left} of {plain:,.0f} µs")


def test_a_planted_idle_break_is_the_only_finding() -> None:
    step = graphs(412, 412 + 118)
    before = Accounted("graph", [step]).verdict(None).findings
    assert [finding.split(":")[0] for finding in before] == ["host stall", "idle break"]
    (finding,) = accounted(step, step.total - 800).verdict(None).findings
    assert finding.startswith("idle break: 130 of 9,456 µs") and "the host had launched nothing" in finding


def test_the_row_is_what_was_taken_and_the_rest_still_adds_up() -> None:
    (left,) = without_profiler([graphs(412, 530)], 800)
    assert left.profiler == pytest.approx(800) and left.total + left.profiler == pytest.approx(412 + 530 + 2 * INSIDE)
    assert left.before_first + left.busy + left.gaps_host + left.gaps_device == pytest.approx(left.total)


def test_a_graph_that_was_launched_in_time_keeps_its_share() -> None:
    call = [Call("cudaGraphLaunch", 0, 9, 1, 1), Call("cudaGraphLaunch", 9, 18, 1, 2)]
    ran = [Activity("a", "kernel", at, at + 9, 0, 7, key) for at, key in ((10, 1), (20, 1), (30, 2), (40, 2))]
    step = waterfall(StepTrace(0.0, tuple(call), tuple(ran), {}))
    (left,) = without_profiler([step], 8)
    assert left.before_first == pytest.approx(6) and left.gaps == step.gaps


def test_launches_of_single_kernels_are_left_as_they_are() -> None:
    steps = [waterfall(step) for step in split_steps(parse_events(eager_step(100, 10, stall=200)))]
    assert without_profiler(steps, 10) == steps


def test_a_step_that_was_shorter_under_the_profiler_is_left_as_it_is() -> None:
    assert without_profiler([graphs(30)], -12) == [graphs(30)]
