"""GraphPool: one thread at a time, one stream at a time, and a pool handle that lives from capture to capture."""

import statistics
import threading
import timeit
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepgraph.runtime.capture_guard import serving
from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.pool import GraphPool

WAIT = 20  # seconds, after which a test has failed anyway


def pool_of(device) -> GraphPool:
    return GraphPool(platform_for(device))


def step(pool: GraphPool) -> None:
    pool.enter()
    pool.leave()


@pytest.mark.parametrize("hold", ["step", "capture"])
def test_a_second_thread_is_refused(device, hold: str) -> None:
    pool, inside, go = pool_of(device), threading.Event(), threading.Event()

    def stay() -> None:
        if hold == "step":
            pool.enter()
            inside.set(), go.wait(WAIT)
            pool.leave()
        else:
            with pool.alone():
                inside.set(), go.wait(WAIT)

    def alone() -> None:
        with pool.alone():
            pass

    with ThreadPoolExecutor(1, "worker") as threads:
        done = threads.submit(stay)
        try:
            assert inside.wait(WAIT)
            for call in (pool.enter, alone, pool.follow):
                with pytest.raises(ReplayError, match="two threads in one pool of graphs: MainThread called a runner "):
                    call()
            with pytest.raises(ReplayError, match="while worker_0 was in one"):
                pool.enter()
            assert threading.get_ident() not in serving
        finally:
            go.set()
        done.result(WAIT)
    step(pool)


def test_a_step_inside_a_step_is_refused(device) -> None:
    pool = pool_of(device)
    pool.enter()
    with pytest.raises(ReplayError, match="from inside its own step, or that of a runner with the same pool"):
        pool.enter()
    pool.leave()
    step(pool)


def test_two_pools_do_not_know_of_each_other(device) -> None:
    outer, inner = pool_of(device), pool_of(device)
    outer.enter()
    step(inner)
    assert serving == [threading.get_ident()]
    outer.leave()
    assert not serving


def test_an_error_while_alone_gives_the_turn_back(device) -> None:
    pool = pool_of(device)
    with pytest.raises(ZeroDivisionError), pool.alone():
        raise ZeroDivisionError
    step(pool)


def test_the_handle_is_made_when_it_is_needed_and_replaced_when_it_is_spent() -> None:
    class Handles:
        device, made = torch.device("cpu"), 0

        def new_pool(self) -> int:
            self.made += 1
            return self.made

    platform = Handles()
    pool = GraphPool(platform)
    with pool.alone():
        assert platform.made == 0
        assert (pool.handle, pool.handle) == (1, 1)
        pool.renew()
        assert platform.made == 1 and pool.handle == 2
    with pool.alone():
        assert pool.handle == 2


def test_only_who_holds_the_pool_for_a_capture_gets_its_memory(device) -> None:
    pool = pool_of(device)

    def refused() -> None:
        with pytest.raises(
            CaptureError, match=r"outside of a capture, at test_pool\.py:\d+ in refused: _ = pool\.hand"
        ):
            _ = pool.handle

    refused()
    pool.enter()
    refused()
    pool.leave()
    with pool.alone(), ThreadPoolExecutor(1) as threads:
        _ = pool.handle
        threads.submit(refused).result(WAIT)
    refused()
    step(pool)
    refused()


def test_there_is_nothing_to_follow_where_there_are_no_streams() -> None:
    pool = pool_of("cpu")
    pool.follow()
    step(pool)


class Streams:
    """Stands in for torch's: handles 0 and up, of which some are busy."""

    def __init__(self) -> None:
        self.now, self.busy, self.waits, self.error = 0, set(), [], None

    def external(self, handle: int, device: torch.device) -> "Streams.Stream":
        assert handle  # with 0 torch takes any stream of its pool
        return Streams.Stream(self, handle)

    def default(self, device: torch.device) -> "Streams.Stream":
        return Streams.Stream(self, 0)

    def current(self, device: torch.device) -> "Streams.Stream":
        return Streams.Stream(self, self.now)

    class Stream:
        def __init__(self, all: "Streams", handle: int) -> None:
            self.all, self.handle = all, handle

        def query(self) -> bool:
            if self.all.error is not None:
                raise self.all.error
            return self.handle not in self.all.busy

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.all.waits.append((self.handle, other.handle))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "ExternalStream", fake.external)
    monkeypatch.setattr(torch.cuda, "default_stream", fake.default)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.now, raising=False)
    return fake


class CudaLike:
    device = torch.device("cuda", 0)


def test_another_stream_is_refused_while_the_last_one_works(streams: Streams) -> None:
    pool = GraphPool(CudaLike())
    step(pool)
    streams.now, streams.busy = 0xA0, {0, 0xA0}
    with pytest.raises(
        ReplayError, match=r"on stream 0xa0 while the default stream, where the last .*pool\.follow\(\)"
    ):
        pool.enter()
    assert not serving
    streams.now = 0
    step(pool)  # the turn was given back, and the old stream stays the last


def test_another_stream_is_fine_once_the_last_one_is_done(streams: Streams) -> None:
    pool = GraphPool(CudaLike())
    for streams.now in (0, 0xA0, 0xB0, 0):
        step(pool)
    streams.busy = {0}
    step(pool)  # the same stream: no question
    assert not streams.waits


def test_a_stream_that_follows_is_not_refused(streams: Streams) -> None:
    pool = GraphPool(CudaLike())
    pool.follow()  # nothing yet
    streams.busy = {0, 0xA0}
    step(pool)
    streams.now = 0xA0
    pool.follow()
    pool.follow()
    assert streams.waits == [(0xA0, 0)]
    step(pool)
    streams.now = 0
    with pytest.raises(ReplayError, match="on the default stream while stream 0xa0"):
        pool.enter()


def test_an_error_of_the_driver_gives_the_turn_back(streams: Streams) -> None:
    pool = GraphPool(CudaLike())
    step(pool)
    streams.now, streams.error = 1, RuntimeError("illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        pool.enter()
    streams.now = 0
    step(pool)


@pytest.mark.gpu
def test_one_pool_replayed_from_two_streams() -> None:
    pool, other = pool_of("cuda"), torch.cuda.Stream()
    total = torch.zeros(1000, device="cuda")

    def slow() -> torch.Tensor:
        torch.cuda._sleep(100_000_000)  # about 50 ms
        return total.add_(1)

    pool.platform.warm_up(slow)
    with pool.alone():
        recording, _ = pool.platform.record(slow, pool.handle)
    total.zero_()
    torch.cuda.synchronize()

    def replay() -> None:
        pool.enter()
        try:
            recording.replay()
        finally:
            pool.leave()

    replay()
    with torch.cuda.stream(other):
        with pytest.raises(ReplayError, match=rf"on stream {other.cuda_stream:#x} while the default stream"):
            replay()
        pool.follow()
        assert not other.query()  # it waits, and the host does not
        replay()
    with pytest.raises(ReplayError, match=rf"on the default stream while stream {other.cuda_stream:#x}"):
        replay()
    other.synchronize()
    replay()
    torch.cuda.synchronize()
    assert total.eq(3).all()


@pytest.mark.gpu
def test_two_runners_of_a_pool_share_its_memory() -> None:
    pool = pool_of("cuda")

    def step() -> torch.Tensor:
        return torch.ones(1 << 24, device="cuda").mul_(2).sum()

    def record() -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with pool.alone():
            recordings.append(pool.platform.record(step, pool.handle))
        return torch.cuda.memory_reserved() - before

    pool.platform.warm_up(step)
    recordings: list = []
    assert record() >= 64 << 20
    assert record() < 64 << 20


@pytest.mark.gpu
@pytest.mark.alone
def test_entering_and_leaving_is_cheap() -> None:
    pool = pool_of("cuda")
    runs = timeit.repeat(lambda: step(pool), number=10_000, repeat=7)
    assert statistics.median(runs) / 10_000 < 2e-6
