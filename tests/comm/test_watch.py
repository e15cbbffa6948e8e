"""Ranks that watch each other, in one process: each Watch is a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from stepgraph.comm.errors import CommError
from stepgraph.comm.watch import Watch


class Ended:
    def __init__(self) -> None:
        self.messages: dict[int, str] = {}

    def by(self, rank: int):
        return lambda message: self.messages.__setitem__(rank, message)


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def watches(ended: Ended) -> Iterator[list[Watch]]:
    store, made = dist.HashStore(), {}

    def start(rank: int) -> None:
        made[rank] = Watch(rank, 3, store, "127.0.0.1", grace=0.2, end=ended.by(rank))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [made[rank] for rank in range(3)]
    for watch in made.values():
        watch.close()


def until(condition, seconds: float = 5.0) -> None:
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.01)


def test_a_rank_that_gives_up_is_known_to_all(watches: list[Watch], ended: Ended) -> None:
    watches[1].fail("no memory")
    until(lambda: all(watch.failure for watch in watches))
    assert {watch.failure for watch in watches} == {"rank 1 failed: no memory"}
    with pytest.raises(CommError, match="rank 1 failed: no memory"):
        watches[2].raise_if_failed()


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_is_named(watches: list[Watch], dead: int) -> None:
    watches[dead]._closed.set()  # it notes nothing any more
    for peer in list(watches[dead]._peers):
        peer.shutdown(2)  # what the system does with the connections of a killed process
    others = [watch for rank, watch in enumerate(watches) if rank != dead]
    until(lambda: all(watch.failure for watch in others))
    assert all(watch.failure == f"rank {dead} died" for watch in others)


def test_a_rank_that_hangs_is_ended_after_its_grace(watches: list[Watch], ended: Ended) -> None:
    watches[2].fail("broken")
    until(lambda: len(ended.messages) == 3)
    assert set(ended.messages.values()) == {"rank 2 failed: broken"}


def test_a_rank_that_ends_in_time_is_left_alone(watches: list[Watch], ended: Ended) -> None:
    watches[0]._grace = 2.0  # a busy machine may take longer than 0.2 s to come to the next line but one
    watches[2].fail("broken")
    until(lambda: watches[0].failure is not None)
    watches[0].close()
    time.sleep(2.5)
    assert set(ended.messages) == {1, 2}


def test_leaving_in_order_is_no_death(watches: list[Watch], ended: Ended) -> None:
    for watch in reversed(watches):
        watch.close()
    time.sleep(0.4)
    assert [watch.failure for watch in watches] == [None] * 3
    assert not ended.messages


def test_a_rank_that_is_past_where_another_waits_is_told_of(watches: list[Watch], ended: Ended) -> None:
    watches[2].collectives = 5
    for watch in watches[:2]:
        watch.collectives = 4
    with watches[1].waiting("sharing prompts"):
        until(lambda: all(watch.failure for watch in watches))
    (said,) = {watch.failure for watch in watches}
    assert said is not None
    assert "rank 1 is sharing prompts; rank 2 is in a step that rank 1 does not run" in said


def test_waiting_for_a_rank_that_is_late_is_no_failure(watches: list[Watch], ended: Ended) -> None:
    watches[1].collectives = 4
    watches[0].collectives, watches[2].collectives = 3, 4  # behind, and about to come
    with watches[2].waiting("an earlier meeting"), watches[1].waiting("an earlier meeting"):
        time.sleep(2.5)
    assert [watch.failure for watch in watches] == [None] * 3 and not ended.messages
