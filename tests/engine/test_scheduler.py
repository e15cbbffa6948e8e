"""The scheduler alone: rows without holes, first come first served, the youngest gives way, no block lost."""

import random

from engine.tiny import blocks_held, request
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.engine.kv_blocks import BLOCK_SIZE, BlockPool, blocks_for
from stepgraph.engine.scheduler import Scheduler


def scheduler(num_blocks: int = 100, max_num_seqs: int = 4, chunk_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), max_num_seqs, chunk_tokens)


def prefill(s: Scheduler) -> list[int]:
    """Run the planned prefill; ids of requests that now decode."""
    joined = []
    for chunk in s.plan_prefill():
        chunk.request.computed = chunk.stop
        if chunk.completes:
            chunk.request.output.append(1)
            s.join(chunk.request)
            joined.append(chunk.request.id)
    return joined


def decode(s: Scheduler) -> None:
    s.grow()
    s.take_dirty_rows()
    for one in s.rows:
        one.computed += 1
        one.output.append(1)


def test_first_come_first_served_within_the_chunk() -> None:
    s = scheduler(chunk_tokens=32)
    for id, length in enumerate([20, 20, 5]):
        s.add(request(id, [1] * length))
    assert [(c.request.id, c.start, c.stop) for c in s.plan_prefill()] == [(0, 0, 20), (1, 0, 12)]


def test_a_long_prompt_takes_several_chunks_and_does_not_stop_decoding() -> None:
    s = scheduler(chunk_tokens=16)
    s.add(request(0, [1] * 4, max_tokens=50))
    prefill(s)
    s.add(request(1, [1] * 40))
    for _ in range(2):
        assert prefill(s) == []
        decode(s)
    assert prefill(s) == [1]
    assert len(s.rows[0].output) == 3


def test_no_more_rows_than_allowed() -> None:
    s = scheduler(max_num_seqs=2)
    for id in range(3):
        s.add(request(id, [1] * 4))
    assert prefill(s) == [0, 1] and [one.id for one in s.waiting] == [2]


def test_the_last_row_fills_a_hole() -> None:
    s = scheduler()
    for id in range(3):
        s.add(request(id, [1] * 4))
    prefill(s)
    s.take_dirty_rows()
    s.remove(s.rows[0])
    assert [one.id for one in s.rows] == [2, 1] and s.take_dirty_rows() == [0]
    s.remove(s.rows[1])
    assert [one.id for one in s.rows] == [2] and s.take_dirty_rows() == []


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    s = scheduler(num_blocks=1 + 4, chunk_tokens=64)
    for id in range(2):
        s.add(request(id, [1] * (2 * BLOCK_SIZE - 2), max_tokens=40))
    prefill(s)
    s.add(request(2, [1] * 4))
    while s.preemptions == 0:
        decode(s)
    assert [one.id for one in s.rows] == [0] and [one.id for one in s.waiting] == [1, 2]
    assert s.waiting[0].blocks == [] and s.waiting[0].computed == 0
    assert s.pool.num_free + blocks_held(s.rows) == s.pool.capacity


def test_growth_is_reported_for_rows_that_stay() -> None:
    s = scheduler()
    s.add(request(0, [1] * (2 * BLOCK_SIZE - 1), max_tokens=40))
    prefill(s)
    assert s.grow() == []
    s.take_dirty_rows()
    for _ in range(2):
        s.rows[0].output.append(1)
    assert s.grow() == [(0, 2, s.rows[0].blocks[2])]


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_block_is_lost_or_shared(seed: int) -> None:
    rng = random.Random(seed)
    s = scheduler(num_blocks=rng.randint(10, 30), max_num_seqs=5, chunk_tokens=rng.choice([8, 32, 64]))
    everyone = [request(id, [1] * rng.randint(1, 60), max_tokens=rng.randint(1, 60)) for id in range(12)]
    waiting = list(everyone)
    for _ in range(2000):
        if waiting and rng.random() < 0.3:
            s.add(waiting.pop(0))
        decode(s)
        prefill(s)
        for one in list(s.rows):
            if len(one.output) >= one.max_tokens or rng.random() < 0.002:
                s.remove(one)
        held = [block for one in everyone for block in one.blocks]
        assert len(held) == len(set(held)) and 0 not in held
        assert s.pool.num_free + len(held) == s.pool.capacity
        assert all(len(one.blocks) >= blocks_for(one.computed) for one in s.rows)
        if not waiting and not s.has_work:
            return
    raise AssertionError("requests never finished")
