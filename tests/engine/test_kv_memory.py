"""The cache that grows and shrinks, its pool of blocks, and who gives way."""

import random
from functools import partial

import pytest
import torch
from engine.tiny import CONFIG, request
from runtime.fake_virtual import FakeVirtualMemory

from stepgraph.engine.kv_blocks import BlockPool, block_bytes
from stepgraph.engine.kv_memory import KVMemory
from stepgraph.engine.scheduler import Scheduler
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.virtual import VirtualRange

BLOCK = block_bytes(CONFIG, torch.float32)  # 8 KiB


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the cache, so that memory really comes and goes."""
    monkeypatch.setattr("stepgraph.engine.kv_memory.VirtualRange", partial(VirtualRange, piece=1))


def cache(num_blocks: int = 100, **options: int) -> tuple[KVMemory, FakeVirtualMemory]:
    memory = FakeVirtualMemory(**options)
    return KVMemory(CONFIG, num_blocks, torch.float32, torch.device("cpu"), memory), memory


@pytest.mark.parametrize(("granularity", "least"), [(4096, 2), (1 << 16, 8)])
def test_it_begins_with_the_least_that_a_capture_needs(granularity: int, least: int) -> None:
    kv, memory = cache(granularity=granularity)
    assert kv.resizable and (kv.num_blocks, kv.max_blocks) == (least, 100)
    assert memory.used == kv.nbytes == max(2 * BLOCK, granularity)
    assert kv.cache.shape[0] == 100 and kv.blocks.shape[0] == least and kv.blocks.eq(0).all()


def test_any_sizes_keep_address_and_contents() -> None:
    rng, (kv, memory) = random.Random(0), cache()
    kv.blocks[1] = 7
    for _ in range(50):
        kv.resize(rng.randint(2, 100))
        assert kv.blocks[1].eq(7).all() and kv.blocks.data_ptr() == kv.cache.data_ptr()
        assert kv.num_blocks * BLOCK <= memory.used and memory.untouched()


def test_how_many_blocks_there_can_be() -> None:
    kv, _ = cache()
    assert kv.blocks_in(10 * BLOCK - 1) == 11 and kv.blocks_in(1 << 40) == 100 and kv.blocks_in(-5) == 2


def test_out_of_memory_leaves_it_as_it_was() -> None:
    kv, memory = cache(capacity=10 * BLOCK)
    with pytest.raises(ConfigError, match="stays at 2 blocks"):
        kv.resize(50)
    assert kv.num_blocks == 2 and memory.used == 2 * BLOCK
    kv.resize(10)
    assert kv.num_blocks == 10


@pytest.mark.parametrize("num_blocks", [-1, 1, 101])
def test_sizes_that_cannot_be(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="2 to 100"):
        cache()[0].resize(num_blocks)


def test_without_virtual_memory_it_stays_as_it_is() -> None:
    kv = KVMemory(CONFIG, 10, torch.float32, torch.device("cpu"))
    assert not kv.resizable and kv.blocks.shape[0] == kv.num_blocks == kv.max_blocks == 10
    kv.resize(10)
    with pytest.raises(ConfigError, match="allocated at once"):
        kv.resize(5)


def test_a_cache_of_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        cache(1)


def test_the_pool_hands_new_blocks_out_last_and_lets_free_ones_go() -> None:
    pool = BlockPool(4)
    held = pool.take(2)
    pool.grow(7)
    assert pool.capacity == 6 and pool.take(4) == [3, 4, 5, 6] and held == [1, 2]
    pool.give_back([3, 4, 5, 6])
    pool.shrink(4)
    assert (pool.capacity, pool.num_free) == (3, 1) and pool.take(2) is None


def test_the_pool_keeps_blocks_that_somebody_holds() -> None:
    pool = BlockPool(8)
    pool.take(5)
    with pytest.raises(ValueError, match="2 of the blocks"):
        pool.shrink(4)
    assert (pool.capacity, pool.num_free) == (7, 2)


def test_who_holds_a_block_that_goes_is_preempted() -> None:
    scheduler = Scheduler(BlockPool(20), 4, 64)
    requests = [request(id, [1] * 40) for id in range(4)]
    for one in requests:
        scheduler.add(one)
    for chunk in scheduler.plan_prefill():
        chunk.request.computed = chunk.stop
        if chunk.completes:
            scheduler.join(chunk.request)
    held = {one.id: max(one.blocks, default=0) for one in requests}
    scheduler.vacate(5)
    assert scheduler.preemptions == sum(highest >= 5 for highest in held.values()) > 0
    assert all(one in scheduler.waiting for one in requests if held[one.id] >= 5)
    assert requests[0] in scheduler.rows and requests[0].blocks
    scheduler.pool.shrink(5)
