"""A size that runs out of memory: the others serve, and nothing of what it took stays."""

import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph.runtime import (
    BatchDescriptor,
    CaptureError,
    GraphConfig,
    GraphPool,
    GraphRunner,
    Ladder,
    Mode,
    PaddingPolicy,
    Reason,
    ReplayError,
    Slot,
    StaticBuffers,
)
from stepgraph.runtime.memory.limit import OutOfMemoryAt
from stepgraph.runtime.memory.shortage import asked_for, remedy
from stepgraph.runtime.platforms import DeviceMemory

SIZES = (1, 2, 4, 8, 16)
WIDTH = 1 << 16
MIB = 1 << 20


def runner_of(device: torch.device, sizes: tuple[int, ...] = SIZES, at: int = 0, ballast: int = 0) -> GraphRunner:
    """Its `at`-th recording runs out of memory."""
    slots = [Slot("x", torch.int64, "request", PaddingPolicy.ZERO)]
    buffers = StaticBuffers(max_requests=16, device=device, slots=slots)
    table = torch.ones(100, WIDTH, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (table[x] * 2).sum(1)

    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(sizes))
    runner = GraphRunner(step, buffers, config)
    return GraphRunner(step, buffers, config, pool=GraphPool(OutOfMemoryAt(runner.pool.platform, at, ballast)))


def pool_bytes(runner: GraphRunner) -> int:
    return runner.pool.nbytes()


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("ballast", [0, 64 * MIB])
def test_the_others_serve_and_memory_is_as_without_it(at: int, ballast: int, device: torch.device) -> None:
    lost = SIZES[-at]
    without = runner_of(device, tuple(size for size in SIZES if size != lost))
    without.capture()
    runner = runner_of(device, at=at, ballast=ballast)
    report = runner.capture()
    assert list(report.dropped) == [BatchDescriptor.decode(lost)]
    assert f"out of memory while capturing {lost} request" in report.dropped[BatchDescriptor.decode(lost)]
    if device.type == "cuda":
        assert re.search(
            r"give the KV cache at least [\d.,]+ [GM]iB less", report.dropped[BatchDescriptor.decode(lost)]
        )
    assert [key.num_reqs for key in report.graphs] == [size for size in reversed(SIZES) if size != lost]
    assert abs(pool_bytes(runner) - pool_bytes(without)) <= 4 * MIB
    assert runner(x=[5]).output.tolist() == [2.0 * WIDTH]
    if lost == 16:
        assert runner.coverage()[15].reason is Reason.SIZE_DROPPED
    else:
        assert runner.coverage()[lost - 1].mode is Mode.FULL


class Sticky(OutOfMemoryAt):
    """A pool keeps what a failed recording took, as CUDA's allocator does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left: dict[int, int] = {}

    def pool_bytes(self, pool: Any) -> int:
        return self._platform.pool_bytes(pool) + self.left.get(id(pool), 0)

    def record(self, step: Any, pool: Any) -> Any:
        try:
            return super().record(step, pool)
        except torch.OutOfMemoryError:
            self.left[id(pool)] = self._ballast
            raise


def test_what_it_left_in_the_pool_of_others_is_given_back_by_recording_them_again() -> None:
    runner = runner_of(torch.device("cpu"))
    runner.pool = GraphPool(Sticky(runner.buffers.platform, 3, MIB))
    with runner.pool.alone():
        first = runner.pool.handle
    report = runner.capture()
    assert runner.pool.platform.recorded == 5 + 4
    assert runner.pool._handle is not first and first.nbytes() == 0 and runner.pool.platform.left == {id(first): MIB}
    assert [key.num_reqs for key in report.graphs] == [16, 8, 2, 1] and len(report.dropped) == 1
    assert runner(x=[5, 6]).output.tolist() == [2.0 * WIDTH] * 2


def test_each_dropped_size_and_the_coverage_are_told(caplog: pytest.LogCaptureFixture) -> None:
    runner_of(torch.device("cpu"), at=1).capture()
    said = [record.message for record in caplog.records]
    assert said[0].startswith("no graph of 16 requests: out of memory while capturing 16 requests;")
    assert said[1] == "coverage: graphs run 8 of 1 to 16 requests, 0 of 1 to 16 tokens"
    caplog.clear()
    runner = lazily(runner_of(torch.device("cpu"), at=3))
    runner.capture()
    assert not caplog.records
    runner.capture_pending()
    said = [record.message for record in caplog.records]
    assert said[0].startswith("no graph of 4 requests") and said[1].startswith("coverage: graphs run 16 of 1 to 16")


def lazily(runner: GraphRunner) -> GraphRunner:
    runner.config = replace(runner.config, lazy=True)
    return runner


@pytest.mark.parametrize("at", [2, 3])
def test_a_lazy_runners_pool_keeps_it_for_later_sizes_and_says_so(at: int) -> None:
    """at: of the recordings; the first is that of the largest size, before the gap."""
    runner = lazily(runner_of(torch.device("cpu")))
    platform = Sticky(runner.buffers.platform, at, MIB)
    runner.pool = GraphPool(platform)
    runner.capture()
    with runner.pool.alone():
        handle = runner.pool.handle
    report = runner.capture_pending()
    lost = SIZES[-at]
    assert runner.pool._handle is handle and platform.recorded == len(SIZES)  # nothing is recorded twice
    assert list(report.dropped) == [BatchDescriptor.decode(lost)]
    assert "1.0 MiB stay in the pool" in report.dropped[BatchDescriptor.decode(lost)]
    assert len(runner.capture_report.graphs) == 4 and not runner.pending
    runner.recapture()
    runner.capture_pending()
    assert len(runner.capture_report.graphs) == 5 and platform.left == {id(handle): MIB}


def test_so_does_the_pool_of_two_runners() -> None:
    first, second = (runner_of(torch.device("cpu")) for _ in range(2))
    platform = Sticky(first.buffers.platform, 5 + 3, MIB)
    first.pool = second.pool = GraphPool(platform)
    first.capture()
    with first.pool.alone():
        handle = first.pool.handle
    report = second.capture()
    assert first.pool._handle is handle and platform.recorded == 2 * 5
    assert "1.0 MiB stay in the pool" in report.dropped[BatchDescriptor.decode(4)]
    assert [runner(x=[5]).output.tolist() for runner in (first, second)] == [[2.0 * WIDTH]] * 2


def test_what_is_recorded_again_in_a_gap_keeps_to_its_seconds() -> None:
    """The largest size failed before the gap, so the pool is the gap's own. What it does not get to is pending."""
    runner = lazily(runner_of(torch.device("cpu"), at=1))
    runner.capture()
    platform = Sticky(runner.buffers.platform, 2, MIB)
    runner.pool.platform = platform
    clock = iter([0.0] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepgraph.runtime.capture.time.perf_counter", lambda: next(clock, 99.0))
        report = runner.capture_pending(seconds=1)
    assert len(report.graphs) + len(report.dropped) + len(runner.pending) == 4 and runner.pending


@pytest.mark.alone
def test_ten_rounds_of_release_and_recapture(device: torch.device) -> None:
    runner = runner_of(device)
    runner.capture()
    taken, free = [], []
    for _ in range(10):
        runner.recapture()
        assert runner(x=[5]).output.tolist() == [2.0 * WIDTH]
        memory = runner.pool.platform.memory()
        taken.append(pool_bytes(runner))
        free.append(0 if memory is None else memory.free)
    assert set(taken) == {taken[0]} and free[0] - free[-1] <= MIB
    runner.release()
    assert pool_bytes(runner) == 0


def test_start_ups_leave_nothing_behind() -> None:
    """Ten engines' worth of runners, each dropped as it is; the tape's storages are counted by the pool."""
    pools = []
    for _ in range(10):
        runner = runner_of(torch.device("cpu"))
        runner.capture()
        pools.append(runner.pool._handle)
        assert pools[-1].nbytes() > 0
        del runner
        gc.collect()
    assert [pool.nbytes() for pool in pools] == [0] * 10


def test_a_moved_weight_is_refused_until_recapture() -> None:
    slots = [Slot("x", torch.float32, "request", PaddingPolicy.ZERO)]
    module = torch.nn.Linear(1, 1, bias=False)
    config = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1]))
    buffers = StaticBuffers(max_requests=1, slots=slots)
    runner = GraphRunner(lambda x: x * module.weight[0, 0], buffers, config)
    runner.watch(module)
    runner.capture()
    module.weight.data = torch.full((1, 1), 3.0)
    with pytest.raises(ReplayError, match="weight from cpu"):
        runner(x=[2.0])
    runner.recapture()
    assert runner(x=[2.0]).output.tolist() == [6.0]


class TestRemedy:
    memory = DeviceMemory(total=100 << 30, free=1 << 30, reserved=0, allocated=0)
    keys = [BatchDescriptor.decode(size) for size in (8, 4)]

    def test_it_says_by_how_much(self) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total of 100 GiB")
        said = remedy(error, self.keys[0], self.keys, self.memory)
        assert "3.00 GiB were asked for and 1.00 GiB are free" in said and "decode ladder at 4 requests" in said
        assert "2.00 GiB less" in said and "lower by 0.020" in said

    def test_without_figures_it_says_what(self) -> None:
        said = remedy(torch.OutOfMemoryError("no"), self.keys[1], self.keys, None)
        assert "capture fewer decode sizes" in said and "fewer blocks" in said

    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [("Tried to allocate 20.00 MiB.", 20 * MIB), ("tried to allocate 512 bytes", 512), ("", None)],
    )
    def test_what_was_asked_for(self, text: str, nbytes: int | None) -> None:
        assert asked_for(torch.OutOfMemoryError(text)) == nbytes


def test_a_refused_recapture_keeps_the_graphs() -> None:
    inner, outer = (runner_of(torch.device("cpu")) for _ in range(2))
    inner.capture()
    plain = outer._run.step

    def step(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CaptureError, match="while a step runs"):
            inner.recapture()
        return plain(x)

    outer._run.step = step
    outer(x=[5])
    assert len(inner.capture_report.graphs) == 5 and inner(x=[5]).mode is Mode.FULL


@pytest.mark.parametrize(
    ("sizes", "calls", "error"),
    [
        (SIZES, 4, KeyboardInterrupt()),  # at the second recording
        ((16,), 3, KeyboardInterrupt()),  # in the probe behind the recording, of a single request
        ((16,), 3, torch.OutOfMemoryError("no")),
    ],
)
def test_an_aborted_capture_keeps_nothing(sizes: tuple[int, ...], calls: int, error: BaseException) -> None:
    runner, count, pools = runner_of(torch.device("cpu"), sizes), 0, []
    plain, record = runner._run.step, runner.pool.platform.record

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == calls:
            raise error
        return plain(x)

    def recording(step: Any, pool: Any) -> Any:
        pools.append(pool)
        return record(step, pool)

    runner._run.step, runner.pool.platform.record = step, recording
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            runner.capture()
    else:
        with pytest.raises(CaptureError, match="out of memory in an eager step of 1 request, which tells"):
            runner.capture()
    assert not runner.pool.holds_graphs and runner.output_bytes == 0 and not runner.capture_report.graphs
    assert pools and {pool.nbytes() for pool in pools} == {0}
    assert len(runner.capture().graphs) == len(sizes)


def test_nothing_captured_says_why() -> None:
    with pytest.raises(CaptureError, match="not one size could be captured; 1 request: out of memory"):
        runner_of(torch.device("cpu"), (1,), at=1).capture()


def test_a_size_that_cannot_be_recorded_keeps_nothing_after_the_release(device: torch.device) -> None:
    slots = [Slot("x", torch.int64, "request", PaddingPolicy.ZERO)]
    buffers = StaticBuffers(max_requests=16, device=device, slots=slots)
    table = torch.ones(100, WIDTH, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        looked_up = table[x] * 2
        if len(x) == 4:
            looked_up.sum().item()
        return looked_up.sum(1)

    runner = GraphRunner(step, buffers, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(SIZES)))
    platform = runner.pool.platform
    step(torch.zeros(16, dtype=torch.int64, device=device))
    platform.give_back()
    before = platform.memory()
    report = runner.capture()
    assert list(report.dropped) == [BatchDescriptor.decode(4)]
    assert runner(x=[5]).output.tolist() == [2.0 * WIDTH]
    runner.release()
    after = platform.memory()
    assert before is None or after is None or after.reserved - before.reserved <= 4 * MIB
