"""Traces in Kineto's schema: read, cut into steps, added up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from measure.traces import call, eager_step, graph_step, kernel, other, syncs

from stepgraph.measure.trace.kineto import TraceError, parse_events, read_trace
from stepgraph.measure.trace.steps import split_steps
from stepgraph.measure.trace.waterfall import waterfall


def only(events: list) -> object:
    (step,) = split_steps(parse_events(events))
    return waterfall(step)


def test_a_file_is_read_gzipped_or_not(tmp_path: Path) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": graph_step(100, 1)})
    plain, zipped = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_text(text, encoding="utf-8")
    zipped.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(zipped)
    assert [a.graph_node for a in read_trace(plain).activities] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("{}", "no traceEvents"),
        ("3", "no traceEvents"),
        ('[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "args": {}}]', "not as Kineto writes it"),
        ('["x"]', "not as Kineto writes it"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=why):
        read_trace(path)


def test_a_file_that_is_missing_or_cut_off(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.json")
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(b"{}" * 100)[:-9])
    with pytest.raises(TraceError, match="cut.json.gz"):
        read_trace(cut)


def test_an_eager_step() -> None:
    found = only(eager_step(100, 10))
    assert found.total == pytest.approx(56)
    assert found.before_first == pytest.approx(15)
    assert found.busy == pytest.approx(30) and found.overlap == 0
    assert [(g.us, g.after, g.before, g.host) for g in found.gaps] == [
        (pytest.approx(10), "second", "Memcpy DtoD", True),  # launched at 40, the device was idle from 36 on
        (pytest.approx(1), "first", "second", False),  # launched long before
    ]
    assert (found.launches, found.activities) == (3, 3)
    assert found.submitted == pytest.approx(43)
    assert found.tklqt == pytest.approx((15 - 5) + (26 - 10) + (46 - 40))
    assert found.before_first + found.busy + found.gaps_host + found.gaps_device == pytest.approx(found.total)


def test_a_graph_is_one_launch_and_its_nodes_may_overlap() -> None:
    found = only(graph_step(100, 10))
    assert (found.launches, found.activities) == (1, 3)
    assert found.busy == pytest.approx(28) and found.overlap == pytest.approx(2)
    assert found.gaps_device == pytest.approx(1) and found.gaps_host == 0
    assert found.tklqt == pytest.approx(10)
    assert found.total == pytest.approx(43)


def test_idle_inside_a_graph_is_never_the_hosts() -> None:
    found = only(graph_step(100, 10, idle=100))
    assert found.gaps[0].us == pytest.approx(101) and not found.gaps[0].host


def test_a_stall_is_in_front_of_the_first_kernel() -> None:
    assert only(eager_step(100, 10, stall=200)).before_first == pytest.approx(215)


def test_what_runs_between_two_steps_belongs_to_neither() -> None:
    rewind = [call("cudaLaunchKernel", 200, 203, 50), kernel("fill", 205, 207, 50)]
    steps = split_steps(parse_events([*eager_step(100, 10), *rewind, *graph_step(300, 60)]))
    assert [step.begin for step in steps] == [100, 300]
    assert [len(step.activities) for step in steps] == [3, 3]


def test_the_syncs_of_two_steps_may_follow_each_other() -> None:
    events = [*graph_step(100, 10), *graph_step(160, 60), *syncs(1, 220)]
    assert len(split_steps(parse_events(events))) == 2


def test_a_step_may_synchronise_itself() -> None:
    c = 10
    events = [
        *syncs(3, 94),
        call("cudaLaunchKernel", 100, 103, c),
        kernel("first", 105, 115, c),
        call("cudaDeviceSynchronize", 104, 116, 0),
        call("cudaLaunchKernel", 118, 121, c + 1),
        kernel("second", 125, 135, c + 1),
        *syncs(2, 140),
    ]
    assert only(events).total == 35


def test_another_threads_calls_are_no_part_of_a_step() -> None:
    elsewhere = [call("cudaLaunchKernel", 120, 121, 99, tid=7), kernel("other", 130, 140, 99)]
    assert only([*eager_step(100, 10), *elsewhere]).activities == 3


def test_a_call_inside_a_call_launches_nothing_twice() -> None:
    inner = call("cuLaunchKernelEx", 106, 107, 12, cat="cuda_driver")
    found = only([*eager_step(100, 10), inner])
    assert found.activities == 3 and found.tklqt == pytest.approx(32)


def test_steps_that_torchs_profiler_annotated() -> None:
    events = [
        other("user_annotation", "ProfilerStep#1", 90, 150),
        call("cudaLaunchKernel", 100, 103, 1),
        kernel("only", 105, 170, 1),
        other("gpu_user_annotation", "ProfilerStep#1", 105, 170),
    ]
    assert only(events).total == 80


def test_overhead_is_added_up_by_name() -> None:
    lazy = [other("overhead", "Lazy Function Loading", at, at + 2) for at in (110, 120)]
    outside = [other("overhead", "Lazy Function Loading", 10, 50)]
    assert only([*eager_step(100, 10), *lazy, *outside]).overhead == {"Lazy Function Loading": 4}


def test_no_steps() -> None:
    with pytest.raises(TraceError, match="no steps"):
        split_steps(parse_events([kernel("k", 1, 2, 1)]))


def test_a_step_without_work() -> None:
    with pytest.raises(TraceError, match="ran nothing"):
        split_steps(parse_events([*syncs(3, 0), call("cudaEventRecord", 6, 7, 1), *syncs(2, 8)]))


def test_a_step_on_two_devices() -> None:
    events = graph_step(100, 10)
    next(e for e in events if e["name"] == "third")["args"]["device"] = 1
    with pytest.raises(TraceError, match="several devices"):
        split_steps(parse_events(events))
