"""The contract of threads and streams in docs/design.md, statement by statement."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from stepgraph.runtime import (
    ConfigError,
    GraphConfig,
    GraphRunner,
    Ladder,
    Mode,
    PaddingPolicy,
    ReplayError,
    Slot,
    StaticBuffers,
    opaque,
)
from stepgraph.runtime.pool import GraphPool

WAIT = 20  # seconds, after which a test has failed anyway
SLOTS = [
    Slot("x", torch.float32, "request", PaddingPolicy.ZERO, (4,)),
    Slot("total", torch.float32, "request", PaddingPolicy.ZERO, (4,), owner="device"),
]


def accumulate(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return total.mul_(0.5).add_(x) * 2


def runner_of(
    step: Callable = accumulate, device="cpu", mode="FULL_DECODE_ONLY", sizes=(2, 4), pool: GraphPool | None = None
) -> GraphRunner:
    buffers = StaticBuffers(max_requests=4, device=device, slots=SLOTS)
    return GraphRunner(step, buffers, GraphConfig.preset(mode, ladder=Ladder.explicit(sizes)), pool=pool)


def captured(*args, **kwargs) -> GraphRunner:
    runner = runner_of(*args, **kwargs)
    runner.capture()
    return runner


def rows(value: float, device="cpu") -> torch.Tensor:
    return torch.full((2, 4), float(value), device=device)


class Gate:
    """Lets a step stop where a test wants it: `stop()` in the step, `held()` around what happens meanwhile."""

    def __init__(self) -> None:
        self.armed, self._reached, self._go = False, threading.Event(), threading.Event()

    def stop(self) -> None:
        if self.armed:
            self._reached.set()
            assert self._go.wait(WAIT)

    @contextmanager
    def held(self, call: Callable) -> Iterator[None]:
        self.armed = True
        with ThreadPoolExecutor(1, "worker") as pool:
            done = pool.submit(call)
            try:
                assert self._reached.wait(WAIT)
                yield
            finally:
                self.armed = False
                self._go.set()
            done.result(WAIT)


# One runner, one thread at a time


def test_a_second_thread_is_refused_in_an_eager_step(device) -> None:
    gate = Gate()

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        gate.stop()
        return accumulate(x, total)

    runner, first = runner_of(step, device, mode="NONE"), []
    with gate.held(lambda: first.append(runner(x=rows(3)).output.clone())):
        for call in (lambda: runner(x=rows(9)), runner.capture, runner.release):
            with pytest.raises(
                ReplayError, match="two threads .*: MainThread called a runner while worker_0 was in one"
            ):
                call()
    assert first[0].eq(6).all() and runner.stats.steps == 1
    assert runner(x=rows(1)).output.eq(5).all()  # the worker has left


def test_a_second_thread_is_refused_in_a_replay() -> None:
    gate = Gate()

    @opaque
    def slow(x: torch.Tensor) -> torch.Tensor:
        gate.stop()
        return x + 1

    runner = captured(lambda x, total: slow(x))
    with gate.held(lambda: runner(x=rows(3))), pytest.raises(ReplayError, match="two threads in one pool"):
        runner(x=rows(9))
    out = runner(x=rows(1))
    assert out.mode is Mode.FULL and out.output.eq(2).all()


def test_a_second_thread_is_refused_during_the_capture(device) -> None:
    gate = Gate()

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        gate.stop()
        return accumulate(x, total)

    runner = runner_of(step, device)
    with gate.held(runner.capture), pytest.raises(ReplayError, match="MainThread called a runner while worker_0"):
        runner(x=rows(9))
    assert runner(x=rows(1)).output.eq(2).all()


def test_a_step_that_calls_its_own_runner_is_refused() -> None:
    runner = runner_of(lambda x, total: runner(x=x).output, mode="NONE")
    with pytest.raises(ReplayError, match="from inside its own step"):
        runner(x=rows(1))


def test_a_step_that_raises_leaves_the_runner_free(device) -> None:
    runner = runner_of(lambda x, total: x / 0 if x.shape[0] > 1 else 1 // 0, device, mode="NONE")
    with pytest.raises(ZeroDivisionError):
        runner(x=rows(1)[:1])
    assert runner(x=rows(1)).output.isinf().all()


def test_threads_may_take_turns(device) -> None:
    """Each with the step's inputs and what it reads of the output inside its turn."""
    runner, lock, seen = captured(device=device), threading.Lock(), []

    def work(value: int) -> None:
        for _ in range(20):
            with lock:
                runner.buffers.reset()
                seen.append(runner(x=rows(value)).output.eq(2 * value).all().item())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (1, 2, 3)))
    assert seen == [True] * 60


# Two runners


def test_two_runners_run_in_two_threads_at_once(device) -> None:
    def work(runner: GraphRunner, value: int) -> list[float]:
        if device.type == "cpu":
            return [runner(x=rows(value)).output[0, 0].item() for _ in range(50)]
        with torch.cuda.stream(torch.cuda.Stream()):
            return [runner(x=rows(value)).output[0, 0].item() for _ in range(50)]

    runners = [captured(device=device) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, runners, (1, 3))
    expected = [2 * (2 - 0.5**step) for step in range(50)]
    assert first == pytest.approx(expected, rel=1e-6)
    assert second == pytest.approx([3 * value for value in expected], rel=1e-6)


def test_two_runners_of_one_pool_take_turns(device) -> None:
    first = captured(device=device)
    second = captured(lambda x, total: total.add_(x) * 3, device, pool=first.pool)
    sums, last = [0.0, 0.0], None
    for value in range(6):
        last = first(x=rows(value)).output  # it lies in the runner's own memory
        assert second(x=rows(value)).output.eq(3 * (sums[1] + value)).all()
        sums = [sums[0] / 2 + value, sums[1] + value]
        assert last.eq(2 * sums[0]).all()
    first.release()
    assert second(x=rows(1)).output.eq(3 * (sums[1] + 1)).all()
    first.capture()
    assert first(x=rows(1)).output.eq(2).all() and second(x=rows(1)).output.eq(3 * (sums[1] + 2)).all()


def test_two_threads_in_two_runners_of_one_pool_are_refused(device) -> None:
    gate = Gate()

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        gate.stop()
        return accumulate(x, total)

    second = captured(device=device)
    first = runner_of(step, device, mode="NONE", pool=second.pool)
    with gate.held(lambda: first(x=rows(3))), pytest.raises(ReplayError, match="two threads in one pool of graphs"):
        second(x=rows(9))
    assert second(x=rows(1)).output.eq(2).all()


def test_a_step_that_calls_a_runner_of_its_pool_is_refused() -> None:
    inner = captured()
    outer = runner_of(lambda x, total: inner(x=x).output, mode="NONE", pool=inner.pool)
    with pytest.raises(ReplayError, match="or that of a runner with the same pool"):
        outer(x=rows(1))


def test_a_pool_is_of_the_buffers_device() -> None:
    class Elsewhere:
        device = torch.device("meta")

    with pytest.raises(ConfigError, match="a pool on meta for buffers on cpu"):
        runner_of(pool=GraphPool(Elsewhere()))


# Other threads during a capture


def test_another_thread_computes_during_a_capture(device) -> None:
    """On a stream of its own, with fresh memory and host reads; nothing of it gets into the graph."""
    calls, results = [], []

    def elsewhere() -> None:
        y = torch.ones(1 << 20, device=device)
        results.append((y * 3).sum().item())

    def work() -> None:
        if device.type == "cpu":
            return elsewhere()
        with torch.cuda.stream(torch.cuda.Stream()):
            return elsewhere()

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        half = total.mul_(0.5)
        calls.append(len(x))
        if calls == [4, 4]:  # warmed up once: this is the recording
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(WAIT)
        return half.add_(x) * 2

    work()  # its kernels are loaded
    runner = captured(step, device, sizes=[4])
    assert results == [3 * (1 << 20)] * 2
    assert runner(x=rows(3)).output.eq(6).all() and len(results) == 2


# Gradients and inference mode


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "NONE"])
def test_a_step_runs_without_gradients(device, mode: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    runner = captured(lambda x, total: total.add_(x * weight), device, mode)
    for _ in range(3):
        out = runner(x=rows(1))
    assert not out.output.requires_grad and not runner.buffers["total"].requires_grad
    assert out.output.eq(3).all()


def test_a_capture_in_inference_mode_serves_outside_it(device) -> None:
    with torch.inference_mode():
        runner = captured(device=device, sizes=[2])
        assert runner(x=rows(1)).output.eq(2).all()
    assert runner(x=rows(1)).output.eq(3).all()
    out = runner(x=torch.ones(3, 4))  # above the ladder: eager, in the caller's mode
    assert out.mode is Mode.EAGER and out.output[2].eq(2).all()


# What stays alive


def test_the_runner_keeps_its_step_alive(device) -> None:
    def make() -> GraphRunner:
        weight = torch.full((4,), 7.0, device=device)
        return captured(lambda x, total: x * weight, device)

    runner = make()
    churn = [torch.zeros(4, device=device) for _ in range(100)]
    assert runner(x=rows(2)).output.eq(14).all() and churn


# Streams


@pytest.mark.gpu
def test_a_capture_runs_on_a_stream_of_its_own() -> None:
    seen = set()

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        seen.add(torch.cuda.current_stream().cuda_stream)
        return accumulate(x, total)

    mine = torch.cuda.Stream()
    runner = runner_of(step, "cuda")
    with torch.cuda.stream(mine):
        runner.capture()
        assert torch.cuda.current_stream() == mine
    assert len(seen) == 1
    assert not seen & {mine.cuda_stream, torch.cuda.default_stream().cuda_stream}


@pytest.mark.gpu
def test_the_first_call_may_come_on_any_stream() -> None:
    runner = captured(device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert runner(x=rows(1)).output.eq(2).all()


@pytest.mark.gpu
def test_a_replay_runs_on_the_callers_stream() -> None:
    runner, other = captured(device="cuda"), torch.cuda.Stream()
    runner(x=rows(1))
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        runner(num_requests=2)
        done = other.record_event()
    assert not done.query()  # it waits behind the sleep, and neither the host nor the default stream waits for it
    torch.cuda.default_stream().synchronize()
    assert not done.query()
    done.synchronize()


@pytest.mark.gpu
def test_a_change_of_the_stream_without_an_order_is_refused() -> None:
    runner, other = captured(device="cuda"), torch.cuda.Stream()
    runner(x=rows(1))
    torch.cuda._sleep(100_000_000)  # about 50 ms
    with torch.cuda.stream(other), pytest.raises(ReplayError, match=r"two streams in one pool .*pool\.follow\(\)"):
        runner(x=rows(9))
    assert runner(x=rows(1)).output.eq(3).all() and runner.stats.steps == 2


@pytest.mark.gpu
@pytest.mark.parametrize("two", [False, True])
def test_who_changes_the_stream_has_it_follow(two: bool) -> None:
    """With one runner, or with two that share a pool."""
    runner, streams = captured(device="cuda"), [torch.cuda.Stream() for _ in range(3)]
    runners, outputs = [runner, captured(device="cuda", pool=runner.pool) if two else runner], []
    for value in range(12):
        with torch.cuda.stream(streams[value % 3]):
            runner.pool.follow()
            torch.cuda._sleep(2_000_000)
            outputs.append(runners[value % 2](x=rows(value)).output.clone())
    torch.cuda.synchronize()
    totals = [0.0, 0.0]
    for value, output in enumerate(outputs):
        which = value % 2 if two else 0
        totals[which] = totals[which] / 2 + value
        assert output.eq(2 * totals[which]).all()


@pytest.mark.gpu
def test_an_input_made_on_another_stream_is_waited_for_by_an_event() -> None:
    runner, other = captured(device="cuda"), torch.cuda.Stream()
    made = rows(0, "cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        made.fill_(8)
        ready = other.record_event()
    ready.wait()
    assert runner(x=made).output.eq(16).all()


# Pools


@pytest.mark.gpu
def test_a_graph_of_the_callers_own_has_its_own_pool() -> None:
    runner, y, graph = captured(device="cuda"), torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = (y + 1) * 3
    for value in range(1, 5):
        y.fill_(value)
        graph.replay()
        runner.buffers.reset()
        assert runner(x=rows(value)).output.eq(2 * value).all() and z.eq(3 * (value + 1)).all()
    runner.release()
    graph.replay()
    assert z.eq(15).all()


@pytest.mark.gpu
def test_a_pool_is_held_until_the_release() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(1 << 24, device=x.device).mul(2).sum()  # 64 MiB for each of two tensors

    def reserved() -> int:
        gc.collect()  # earlier tests' runners
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    runner = runner_of(step, "cuda")
    before = reserved()
    runner.capture()
    held = reserved() - before
    runner.release()
    assert held >= 64 << 20 and reserved() - before < 64 << 20
