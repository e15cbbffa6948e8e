"""Steps of programs that nobody marked: where they begin, and where all of their time goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.programs import Program, eager, graphs, write_kineto
from measure.traces import eager_step, graph_step, syncs

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.find_steps import find_starts
from stepgraph.measure.trace.kineto import Trace, parse_events
from stepgraph.measure.trace.launches import join, on_gpu
from stepgraph.measure.trace.loop import TraceAccount, account_for
from stepgraph.measure.trace.read import read_any
from stepgraph.measure.trace.steps import split_steps
from stepgraph.measure.trace.waterfall import waterfall


def of(program: Program) -> Trace:
    return parse_events(program.kineto())


def account(program: Program, named: str | None = None) -> TraceAccount:
    return account_for(on_gpu(of(program), None)[0], named)


def begins(program: Program, named: str | None = None) -> tuple[str, int]:
    trace = of(program)
    found = find_starts(trace, join(trace), named)
    return found.how, len(found.at)


def test_a_first_step_that_outlasts_all_others_leaves_none(tmp_path: Path) -> None:
    program = eager(6)
    path = write_kineto(tmp_path / "t.json", program)
    found = json.loads(path.read_text())
    first = next(event for event in found["traceEvents"] if event.get("cat") == "kernel")
    for dur, message in ((1e12, "ends behind all others"), (float("inf"), "not as Kineto writes it")):
        first["dur"] = dur
        path.write_text(json.dumps(found))
        with pytest.raises(TraceError, match=message):
            account_for(read_any(path))


def test_an_eager_loop_is_cut_at_steps_and_not_at_layers() -> None:
    how, count = begins(eager(10, layers=32))
    assert "'embed'" in how and count == 10
    found = account(eager(10, layers=32))
    assert len(found.steps) == 8 and not found.alone
    assert {step.launches for step in found.waterfalls} == {3 + 8 * 32 + 1}


def test_a_loop_of_graphs() -> None:
    found = account(graphs(10))
    assert "a graph of 66 that starts with 'embed'" in found.how
    (step,) = {(step.launches, step.activities) for step in found.waterfalls}
    assert step == (2, 67)
    assert found.waterfalls[0].total == pytest.approx(66 * 10 + 65 * 1 + 1 + 2 + 4 + 20 + 3 + 5)


def test_pieces_of_a_step_are_no_steps() -> None:
    program = Program()
    for _ in range(8):
        for _ in range(32):
            program.graph("norm", "gemm", "gemm")
            program.launch("attention")
        program.launch("argmax")
        program.read_back()
        program.wait()
    assert begins(program)[1] in (7, 8)
    assert {step.launches for step in account(program).waterfalls} == {66}


def test_what_only_some_steps_do_is_part_of_them() -> None:
    program = Program()
    for number in range(32):
        if number % 8 == 0:
            program.launch("write the block table")
        eager(1, program=program)
    how, count = begins(program)
    assert count == 32 and "'embed'" in how


def test_a_loop_whose_tokens_are_read_a_step_late() -> None:
    program = Program()
    for _ in range(12):
        program.graph(*["gemm"] * 20)
        program.read_back()
        read = program.device
        program.graph(*["gemm"] * 20)
        program.read_back()
        program.calls.append(("cudaEventSynchronize", program.host, read + 4, program.thread, 0))
        program.host = read + 4
    found = account(program)
    assert len(found.steps) == 22
    assert all(step.host == 0 for step in found.waterfalls[2:])  # the host is always ahead
    assert found.waterfalls[5].total == pytest.approx(20 * 11 + 3)


def test_a_loop_that_never_waits_is_cut_at_the_rarest_launch() -> None:
    program = Program()
    for _ in range(6):
        program.launch("embed")
        for _ in range(40):
            program.launch("layer")
    assert begins(program) == ("each begins with the launch of 'embed', which comes back at even distances", 6)


def test_annotations_as_engines_write_them() -> None:
    program = Program()
    for number in range(6):
        with program.span(f"execute_context_0(0)_generation_{number}({number})"):
            with program.span("gpu_model_runner: forward"):
                program.graph("embed", *["gemm"] * 20)
            program.launch("argmax")
        program.launch("Memcpy DtoH", name="cudaMemcpyAsync", kind="gpu_memcpy")
        program.wait()
    how, count = begins(program)
    assert "like 'execute_context_0(0)_generation_0(0)'" in how and count == 6
    assert {step.launches for step in account(program).waterfalls} == {3}  # with what stands behind the annotation


def test_torchs_own_annotation_comes_first() -> None:
    program = Program()
    for number in range(5):
        with program.span(f"ProfilerStep#{number}"):
            for _ in range(4):
                with program.span("micro batch"):
                    program.launch("gemm")
    assert begins(program)[1] == 5


def test_an_annotation_of_a_small_part_is_none_of_a_step() -> None:
    program = eager(3)
    for _ in range(7):
        eager(1, program=program)
        with program.span("log"):
            program.launch("sum")
    assert "'embed'" in begins(program)[0]


def test_a_beginning_by_name() -> None:
    program = eager(6)
    for _ in range(5):
        with program.span("decode"), program.span("decode inside"):
            eager(1, program=program)
    assert begins(program, "decode") == ("each begins with the annotation named 'decode'", 5)
    assert begins(program, "argm") == ("each begins with the launch named 'argm'", 11)
    assert begins(program, "StreamSync") == ("each begins with the call named 'StreamSync'", 11)
    with pytest.raises(TraceError, match="'nothing' is in the trace 0 times"):
        begins(program, "nothing")


def test_no_steps() -> None:
    program = Program()
    for number in range(20):
        program.launch(f"kernel {number}")
    with pytest.raises(TraceError, match="no steps found.*--step"):
        account(program)
    with pytest.raises(TraceError, match="no steps found"):
        account(eager(3))


@settings(deadline=None, max_examples=40)
@given(
    pauses=st.lists(st.floats(0, 500), min_size=5, max_size=12),
    graphed=st.lists(st.booleans(), min_size=12, max_size=12),
    stall=st.floats(0, 200),
)
def test_every_microsecond_of_the_device_is_in_one_place(
    pauses: list[float], graphed: list[bool], stall: float
) -> None:
    program = Program()
    for pause, is_graph in zip(pauses, graphed, strict=False):
        program.launch("embed")
        if is_graph:
            program.graph("gemm", "gemm", "gemm")
        else:
            for _ in range(3):
                program.launch("gemm")
                program.host += stall
        program.read_back()
        program.wait()
        program.host += pause
    found = account(program, "embed")
    for step in found.waterfalls:
        parts = (step.before_first, step.busy, step.gaps_host, step.gaps_device)
        assert sum(parts) == pytest.approx(step.total) and min(parts) >= 0
        assert step.overlap == pytest.approx(0, abs=1e-6)
    ends = [activity.stop for activity in of(program).activities if activity.kind == "gpu_memcpy"]
    assert sum(step.total for step in found.waterfalls) == pytest.approx(ends[-2] - ends[0])
    busy = sum(activity.stop - activity.start for step in found.steps for activity in step.activities)
    assert sum(step.busy for step in found.waterfalls) == pytest.approx(busy)


def test_a_pause_of_the_host_is_the_hosts() -> None:
    slow, quick = (account(eager(6, host_us=us)).waterfalls[0] for us in (320, 20))
    assert slow.before_first - quick.before_first == pytest.approx(300)
    assert slow.total - quick.total == pytest.approx(300)


def test_work_of_the_next_step_that_begins_early_is_counted_once() -> None:
    events = graphs(6).kineto()
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    for copy in copies:  # on a stream of its own, so slow that the next step begins meanwhile
        copy["dur"] += 100
    trace = parse_events(events)
    found = account_for(trace)
    ends = [event["ts"] + event["dur"] for event in copies]
    assert sum(step.total for step in found.waterfalls) == pytest.approx(ends[-2] - ends[0])
    assert all(step.busy <= step.total for step in found.waterfalls)


def test_marked_steps_are_as_account_has_them() -> None:
    events = [
        event for i in range(5) for event in (*eager_step(400 * i, 20 * i), *graph_step(400 * i + 200, 20 * i + 9))
    ]
    trace = parse_events(events)
    found = account_for(trace)
    assert found.alone and list(found.waterfalls) == [waterfall(step) for step in split_steps(trace)]
    assert [len(launches) for launches in found.launches] == [3, 1] * 5


def test_synchronising_often_somewhere_marks_nothing() -> None:
    program = eager(8, program=Program(thread=100))
    events = [*syncs(3, 0), *program.kineto(), *syncs(2, program.host + 10)]
    assert account_for(parse_events(events)).alone  # all of it stands between marks
    late = [*program.kineto(), *syncs(3, program.host + 10), *graph_step(program.host + 40, 5000)]
    assert not account_for(parse_events(late)).alone


def test_the_busiest_gpu_or_another() -> None:
    first, second = eager(6), graphs(6, program=Program(thread=5, gpu=1))
    for name, start, stop, thread, key in second.calls:
        first.calls.append((name, start, stop, thread, key + 10_000))
    first.ran += [(*ran[:5], ran[5] + 10_000, ran[6]) for ran in second.ran]
    trace = of(first)
    for asked, given_gpu, launches in ((None, 0, 68), (0, 0, 68), (1, 1, 2)):
        mine, gpu = on_gpu(trace, asked)
        assert gpu == given_gpu and account_for(mine).waterfalls[0].launches == launches
    with pytest.raises(TraceError, match="nothing ran on GPU 7; the trace has GPU 0, 1"):
        on_gpu(trace, 7)


def test_launches_from_before_the_recording() -> None:
    program = eager(6)
    program.calls = [call for call in program.calls if call[0] == "cudaStreamSynchronize"]
    with pytest.raises(TraceError, match="no call in the trace launched"):
        account(program)
    program = eager(6)
    program.ran.insert(0, ("kernel", "earlier", 0.0, 900.0, 0, 99_999, 0))
    assert account(program).unlaunched == 1
    assert account(eager(6)).early == 0
