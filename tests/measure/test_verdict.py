"""What a step is bound by, from made-up timelines."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.measure.trace.waterfall import Gap
from stepgraph.measure.verdict import Bound, Parts, verdict
from stepgraph.measure.work import Floor

READS = Floor(read=3300, compute=10, total=3300, bound_by_compute=0)
COMPUTES = Floor(read=4200, compute=11000, total=11800, bound_by_compute=11000)
GRAPH = Parts(
    total=4100, before_first=30, busy=3950, gaps_host=0, gaps_device=120, submitted=25, launches=1, activities=330,
    floor=READS, gaps=[Gap(1.0, place, "a", "b", False) for place in range(1, 121)],
)  # fmt: skip
EAGER = replace(
    GRAPH, total=12000, busy=4000, gaps_host=7900, gaps_device=70, submitted=11500, launches=330,
    gaps=[Gap(26.0, place, "a", "b", True) for place in range(1, 304)],
)  # fmt: skip


def test_a_graph_at_batch_1_is_bound_by_reading() -> None:
    found = verdict(GRAPH)
    assert found.bound is Bound.READING and "3,300 of 4,100 µs (80%)" in found.because
    assert not found.findings


def test_eager_is_bound_by_launching_and_the_budget_is_beside_it() -> None:
    found = verdict(EAGER)
    assert found.bound is Bound.LAUNCHING
    assert "7,930 of 12,000 µs" in found.because and "34.8 µs" in found.because and "12.1 µs of work" in found.because
    assert not found.findings


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    found = verdict(replace(GRAPH, total=15000, busy=14800, floor=COMPUTES))
    assert found.bound is Bound.ARITHMETIC and "11,800 of 15,000" in found.because
    assert "arithmetic the larger part" in found.because


def test_a_host_stall_is_named() -> None:
    found = verdict(replace(GRAPH, total=4300, before_first=230))
    assert found.bound is Bound.READING
    assert found.findings == ("host stall: 230 of 4,300 µs (5%) pass before the first kernel starts",)


def test_a_host_stall_may_be_all_there_is() -> None:
    found = verdict(replace(GRAPH, total=700, before_first=400, busy=280, gaps_device=20, floor=None))
    assert found.bound is Bound.OTHER and "the host's first launch" in found.because


def test_an_idle_break_is_named_with_its_place() -> None:
    gap = Gap(101.0, 160, "gate_up", "x" * 60, False)
    found = verdict(replace(GRAPH, total=4200, gaps_device=220, gaps=[gap, *GRAPH.gaps]))
    (finding,) = found.findings
    assert finding.startswith("idle break: 101 of 4,200 µs (2%) after gate_up and before xxx")
    assert "activity 160; the work was there" in finding
    assert (
        "the host had launched nothing"
        in verdict(replace(GRAPH, gaps=[replace(gap, host=True), *GRAPH.gaps])).findings[0]
    )


def test_gaps_that_are_all_alike_are_no_break() -> None:
    assert not verdict(replace(EAGER, gaps=[Gap(80.0, place, "a", "b", True) for place in range(1, 50)])).findings


def test_slow_kernels_and_idle_graphs_are_something_else() -> None:
    slow = verdict(replace(GRAPH, total=9100, busy=8950))
    assert slow.bound is Bound.OTHER and "beyond what bytes and arithmetic need" in slow.because
    unknown = verdict(replace(GRAPH, floor=None))
    assert unknown.bound is Bound.OTHER and "not known" in unknown.because
    idle = verdict(replace(GRAPH, total=9000, gaps_device=5000))
    assert idle.bound is Bound.OTHER and "between what it has been given" in idle.because


def test_a_floor_above_what_was_measured_is_cut() -> None:
    assert "(100%)" in verdict(replace(GRAPH, total=1000, before_first=0, gaps_device=0, busy=1000)).because
