"""A capture that begins while a step runs is refused, by the line that begins it."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepgraph.runtime import Backend, GraphConfig, GraphRunner, Ladder, PaddingPolicy, Slot, StaticBuffers
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.capture_guard import no_captures, refuse_capture_while_serving, serving
from stepgraph.runtime.config import DecodePhase
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.pool import GraphPool

WAIT = 20  # seconds, after which a test has failed anyway


class FakeGraph:
    """In place of torch.cuda.CUDAGraph: notes its captures."""

    def __init__(self) -> None:
        self.calls: list = []

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        self.calls.append((pool, capture_error_mode))


class FakeCapture:
    """In place of torch.cuda.graph."""

    def __init__(self, graph: FakeGraph) -> None:
        self.graph, self.changed_stream = graph, False

    def __enter__(self) -> None:
        self.changed_stream = True
        self.graph.capture_begin()

    def __exit__(self, *args: object) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)


def test_outside_a_step_anything_may_capture() -> None:
    refuse_capture_while_serving()


def test_a_capture_in_a_step_names_its_line() -> None:
    pool = GraphPool(platform_for("cpu"))
    pool.enter()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(CaptureError) as caught:
        refuse_capture_while_serving()
    pool.leave()
    where = f"at test_capture_guard.py:{line} in test_a_capture_in_a_step_names_its_line: refuse_capture"
    assert where in str(caught.value) and "before the first step" in str(caught.value)
    refuse_capture_while_serving()


def test_an_outer_step_counts_after_an_inner_one() -> None:
    outer, inner = (GraphPool(platform_for("cpu")) for _ in range(2))
    outer.enter()
    inner.enter()
    inner.leave()
    with pytest.raises(CaptureError):
        refuse_capture_while_serving()
    outer.leave()


def test_raw_captures_are_refused_by_their_line(fakes) -> None:
    graph = FakeGraph()
    capture = FakeCapture(graph)
    with no_captures():
        line = inspect.currentframe().f_lineno + 1
        with pytest.raises(CaptureError, match=rf"test_capture_guard\.py:{line} in .*: with .*, capture:"), capture:
            pass
        with pytest.raises(CaptureError, match=r"test_capture_guard\.py:\d+ in .*: graph\.capture_begin\(\)"):
            graph.capture_begin()
    assert not graph.calls and not capture.changed_stream and not serving


def test_torch_is_as_before_afterwards(fakes) -> None:
    begin, enter = FakeGraph.capture_begin, FakeCapture.__enter__
    with pytest.raises(ZeroDivisionError), no_captures(), no_captures():
        assert FakeGraph.capture_begin is not begin and FakeCapture.__enter__ is not enter
        raise ZeroDivisionError
    assert FakeGraph.capture_begin is begin and FakeCapture.__enter__ is enter and not serving
    graph = FakeGraph()
    with FakeCapture(graph):
        graph.capture_begin("pool", capture_error_mode="relaxed")
    assert graph.calls == [(None, "global"), ("pool", "relaxed")]


def test_the_inner_of_two_does_not_end_the_outer(fakes) -> None:
    with no_captures():
        with no_captures():
            pass
        with pytest.raises(CaptureError):
            FakeGraph().capture_begin()


def test_another_thread_captures_as_it_pleases(fakes) -> None:
    graph = FakeGraph()
    with no_captures(), ThreadPoolExecutor(1) as threads:
        threads.submit(graph.capture_begin, "pool").result(WAIT)
        threads.submit(refuse_capture_while_serving).result(WAIT)
    assert graph.calls == [("pool", "global")]


def test_two_threads_guard_and_leave_in_any_order(fakes) -> None:
    begin, inside, go = FakeGraph.capture_begin, threading.Event(), threading.Event()

    def stay() -> None:
        with no_captures():
            inside.set()
            assert go.wait(WAIT)
            with pytest.raises(CaptureError):  # the other has left meanwhile
                FakeGraph().capture_begin()

    with ThreadPoolExecutor(1) as threads:
        with no_captures():
            done = threads.submit(stay)
            assert inside.wait(WAIT)
        graph = FakeGraph()
        graph.capture_begin()  # this thread is in no step any more
        go.set()
        done.result(WAIT)
    assert graph.calls and FakeGraph.capture_begin is begin


def test_torchs_own_classes_have_what_is_hooked() -> None:
    enter, begin = torch.cuda.graph.__enter__, torch.cuda.CUDAGraph.capture_begin
    with no_captures():
        assert torch.cuda.graph.__enter__ is not enter and torch.cuda.CUDAGraph.capture_begin is not begin
    assert torch.cuda.graph.__enter__ is enter and torch.cuda.CUDAGraph.capture_begin is begin


DECODE = DecodePhase(Backend.FULL, Ladder.explicit([2]))


def runner_of(step, device="cpu", phase: DecodePhase = DECODE) -> GraphRunner:
    slots = [Slot("x", torch.float32, "request", PaddingPolicy.ZERO)]
    runner = GraphRunner(step, StaticBuffers(max_requests=4, device=device, slots=slots), GraphConfig(phase))
    runner.capture()
    return runner


def test_a_runner_captured_inside_anothers_step_is_refused_by_its_line(device) -> None:
    runners: dict[int, GraphRunner] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:  # a batch that no graph covers
            runners.setdefault(len(x), runner_of(lambda x: x, device))
        return x + 1

    runner = runner_of(step, device)
    with pytest.raises(CaptureError, match=r"test_capture_guard\.py:\d+ in runner_of: runner\.capture\(\)"):
        runner(x=torch.ones(3))
    assert runner(x=torch.ones(2)).output.eq(2).all() and not serving


def test_a_step_that_captures_its_own_runner_is_refused() -> None:
    runner = runner_of(lambda x: runner.capture() if len(x) > 2 else x)
    with pytest.raises(CaptureError, match=r"in <lambda>: runner = runner_of\(lambda x: runner\.capture"):
        runner(x=torch.ones(3))


def test_a_raw_capture_in_a_replayed_break_is_refused_by_its_line(fakes) -> None:
    graphs: list[FakeGraph] = []
    serves: list[bool] = []

    @graph_break
    def attention(x: torch.Tensor) -> torch.Tensor:
        if serves:
            graphs.append(FakeGraph())
            graphs[-1].capture_begin()
        return x + 1

    runner = runner_of(attention, phase=DecodePhase(Backend.BREAKABLE, Ladder.explicit([2])))
    assert runner(x=torch.ones(2)).output.eq(2).all()
    serves.append(True)
    with pytest.raises(CaptureError, match=r"in attention: graphs\[-1\]\.capture_begin\(\)"):
        runner(x=torch.ones(2))
    assert not graphs[0].calls and not serving


def test_a_platforms_recording_in_an_eager_step_is_refused_by_its_line(device) -> None:
    platform = platform_for(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            platform.record(lambda: x + 1, platform.new_pool())
        if len(x) == 4:
            platform.record_breakable(lambda: x + 1, platform.new_pool())
        return x

    runner = runner_of(step, device)
    for size, name in ((3, "record"), (4, "record_breakable")):
        with pytest.raises(CaptureError, match=rf"in step: platform\.{name}\("):
            runner(x=torch.ones(size))


def test_a_raw_capture_in_an_eager_step_is_refused_by_its_line(fakes) -> None:
    graphs: list[FakeGraph] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            graphs.append(FakeGraph())
            graphs[-1].capture_begin()
        return x

    runner = runner_of(step)
    with pytest.raises(CaptureError, match=r"in step: graphs\[-1\]\.capture_begin\(\)"):
        runner(x=torch.ones(3))
    assert not graphs[0].calls
    graphs[0].capture_begin()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["graph", "capture_begin", "make_graphed_callables", "compile"])
def test_a_lazy_capture_on_the_gpu_leaves_no_trace(how: str) -> None:
    x = torch.ones(8, device="cuda")
    compiled = torch.compile(torch.relu, mode="reduce-overhead")

    def lazy() -> None:
        graph = torch.cuda.CUDAGraph()
        if how == "graph":
            with torch.cuda.graph(graph):
                x + 1
        elif how == "capture_begin":
            graph.capture_begin()
        elif how == "make_graphed_callables":
            torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8, device="cuda"), (torch.ones(2, 8, device="cuda"),))
        else:
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(x)

    before = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=r"test_capture_guard\.py:\d+ in lazy: "), no_captures():
        lazy()
    assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert y.eq(2).all()
