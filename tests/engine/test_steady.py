"""Thousands of steady steps with joins and leaves: no drift against fresh runs, no block lost, and a cheap host."""

import random
import time

import pytest
import torch
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine

from stepgraph.engine.kv_blocks import BlockPool
from stepgraph.engine.request import Request
from stepgraph.engine.steady import SteadyRows
from stepgraph.runtime import Ladder

SETTINGS = [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20}, {"repetition_penalty": 1.3}]
COMPARED = 40


def make(id: int) -> Request:
    """The request of this number, always the same; long ones, so that most steps are steady."""
    rng = random.Random(id)
    prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 40))]
    return request(id, prompt, rng.randint(1, 200), seed=id, **SETTINGS[id % len(SETTINGS)])


def check_no_drift(device: torch.device, steps: int) -> None:
    """Some requests, spread over the whole run, are served once more, each alone and by an engine that is new."""
    core, rng = tiny_engine(device, max_num_seqs=8, ladder=Ladder.vllm(8), num_blocks=90), random.Random(0)
    served: list[Request] = []
    next_id = 0
    while core.runner.stats.steps < steps or core.scheduler.has_work:
        more = core.runner.stats.steps < steps and len(core.scheduler.waiting) < 2
        if more and (rng.random() < 0.05 or not core.scheduler.has_work):
            served.append(make(next_id))
            core.scheduler.add(served[-1])
            next_id += 1
        for one, _ in core.step_ahead():
            finish(core, one)
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity
    new = tiny_engine(device, max_num_seqs=8, ladder=Ladder.vllm(8))
    for one in served[:: max(len(served) // COMPARED, 1)]:
        assert [one.output] == run_all(new, [make(one.id)]), one.id


def test_no_drift_in_2000_steps() -> None:
    check_no_drift(torch.device("cpu"), 2000)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_drift_in_100000_steps() -> None:
    check_no_drift(torch.device("cpu"), 100_000)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_no_drift_in_100000_steps_on_a_gpu() -> None:
    check_no_drift(torch.device("cuda"), 100_000)


def test_a_steady_step_costs_the_host_little() -> None:
    """Of a recording of nothing, so that it is Python's time alone. Bounds are wide: machines differ."""
    core = tiny_engine(max_num_seqs=256, num_blocks=5000, ladder=Ladder.explicit([256]), chunk_tokens=512)
    for id in range(256):
        core.scheduler.add(request(id, [1 + id % 50, 2], max_tokens=200))
    while core.scheduler.waiting or core.scheduler.prefilling:
        core.step_ahead()
    for graph in core.runner.capture_report.graphs.values():
        graph.recording.release()
    samples = []
    for _ in range(100):
        started = time.perf_counter()
        produced = core.step_ahead()
        samples.append(time.perf_counter() - started)
        assert len(produced) == 256
    assert sorted(samples)[50] < 300e-6


@pytest.mark.parametrize("limit", [17, 33, 200])
def test_the_countdown_ends_where_a_block_or_a_length_does(limit: int) -> None:
    pool = BlockPool(50)
    rows = []
    for id, length in enumerate((5, 9, 16)):
        one = request(id, [1] * length, max_tokens=limit - length)
        one.blocks = pool.take(1) or []
        rows.append(one)
    steady = SteadyRows(rows, [5, 9, 16], pool)
    steps = 0
    while (grown := steady.next()) is not None:
        steps += 1
        assert all(rows[row].blocks[index] == block for row, index, block in zip(*grown, strict=True))
        for one, start in zip(rows, (5, 9, 16), strict=True):
            assert len(one.blocks) * 16 >= start + steps < limit
    assert 16 + steps == limit - 1  # the longest has its last token then


def test_blocks_for_many_steps_as_far_as_there_are_any() -> None:
    for blocks, reached in ((30, 64), (8, 32), (6, 16), (4, 0)):
        pool = BlockPool(1 + blocks)
        rows = [request(id, [1] * 15, max_tokens=200) for id in range(2)]
        for one in rows:
            one.blocks = pool.take(1) or []
        steady = SteadyRows(rows, [16, 16], pool)
        grown = steady.reach(64)
        assert reached <= steady.left < reached + 16, (blocks, steady.left)
        assert all(rows[row].blocks[index] == block for row, index, block in zip(*grown, strict=True))
        steady.went(steady.left)
        assert steady.left == 0 and pool.num_free >= 2
        assert all(len(one.blocks) * 16 >= length for one, length in zip(rows, steady.lengths, strict=True))


def test_a_loop_that_went_on_to_the_end_of_a_block_needs_one_at_once() -> None:
    """A loop ends where a row has no block, which may be past the steps that blocks were asked for."""
    pool, lengths = BlockPool(9), (3, 5)
    rows = [request(id, [1], max_tokens=200) for id in range(2)]
    for one in rows:
        one.blocks = pool.take(1) or []
    steady = SteadyRows(rows, list(lengths), pool)
    steady.reach(64)
    went = min(len(one.blocks) * 16 - length for one, length in zip(rows, lengths, strict=True))
    assert went > steady.left and pool.num_free == 2
    steady.went(went)
    assert steady.reach(64) == () and steady.left == 0
    assert steady.next() is None


def test_short_blocks_are_left_to_the_scheduler() -> None:
    pool = BlockPool(4)
    rows = [request(id, [1] * 16, max_tokens=100) for id in range(2)]
    for one in rows:
        one.blocks = pool.take(1) or []
    assert SteadyRows(rows, [16, 16], pool).next() is None and pool.num_free == 1
