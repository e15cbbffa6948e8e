"""An engine whose cache is sized after the capture, and again while it serves: same tokens as with a fixed cache."""

import random
from functools import partial

import pytest
import torch
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine
from runtime.fake_virtual import FakeVirtualMemory

from stepgraph.engine.core import EngineCore
from stepgraph.engine.errors import RequestError
from stepgraph.engine.request import Request
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualMemory, VirtualRange

BLOCKS = 300


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the cache, so that memory really comes and goes."""
    monkeypatch.setattr("stepgraph.engine.kv_memory.VirtualRange", partial(VirtualRange, piece=1))


def virtual(device: torch.device) -> VirtualMemory:
    return cuda_virtual_memory(device) if device.type == "cuda" else FakeVirtualMemory()


def requests(count: int = 20, longest: int = 60, max_tokens: int = 20) -> list[Request]:
    rng = random.Random(5)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [request(id, text, max_tokens, seed=id, temperature=0.8 * (id % 2)) for id, text in enumerate(prompts)]


def engine(device: torch.device, **options: object) -> tuple[EngineCore, VirtualMemory]:
    memory = virtual(device)
    return tiny_engine(device, num_blocks=BLOCKS, memory=memory, **options), memory


def intact(core: EngineCore, memory: VirtualMemory) -> bool:
    """Nobody wrote where there is no memory; a device would have stopped everything."""
    if isinstance(memory, FakeVirtualMemory):
        return memory.untouched() and memory.used == core.kv_memory.nbytes
    return True


@pytest.mark.parametrize("graphs", ["full", "breakable", "disabled"])
def test_a_cache_sized_after_the_capture_gives_the_same_tokens(device: torch.device, graphs: str) -> None:
    core, memory = engine(device, graphs=graphs)
    assert core.kv_memory.num_blocks < BLOCKS and intact(core, memory)
    core.resize_kv(BLOCKS)
    assert core.kv_cache.shape[0] == BLOCKS and core.scheduler.pool.capacity == BLOCKS - 1
    assert run_all(core, requests()) == run_all(tiny_engine(device, graphs=graphs), requests())
    assert intact(core, memory)


def test_the_far_end_of_the_cache_is_as_good_as_its_start(device: torch.device) -> None:
    core, _ = engine(device)
    core.resize_kv(BLOCKS)
    core.scheduler.pool._free.reverse()
    mine = requests()
    core.scheduler.add(mine[0])
    core.step()
    assert mine[0].blocks[0] == BLOCKS - 1
    assert run_all(core, mine[1:]) == run_all(tiny_engine(device), requests())[1:]


def test_it_shrinks_and_grows_while_requests_run(device: torch.device) -> None:
    core, memory = engine(device)
    core.resize_kv(BLOCKS)
    core.scheduler.pool._free.reverse()  # so that those who run are in the way
    mine, rng = requests(), random.Random(1)
    for one in mine:
        core.scheduler.add(one)
    steps = 0
    while core.scheduler.has_work:
        for one, _ in core.step():
            finish(core, one)
        steps += 1
        if steps % 7 == 0:
            core.resize_kv(rng.choice([BLOCKS // 10, BLOCKS // 2, BLOCKS]))
            assert intact(core, memory)
    core.resize_kv(BLOCKS // 10)
    core.resize_kv(BLOCKS)
    assert core.scheduler.preemptions > 0 and core.scheduler.pool.num_free == BLOCKS - 1
    assert [one.output for one in mine] == run_all(tiny_engine(device), requests())
    assert core.runner.stats.by_mode().keys() == {"FULL"}


def test_a_request_that_would_never_fit_again_is_not_locked_out(device: torch.device) -> None:
    core, _ = engine(device)
    core.resize_kv(BLOCKS)
    mine = requests(count=3, longest=100, max_tokens=60)
    for one in mine:
        core.scheduler.add(one)
    core.step()
    with pytest.raises(ConfigError, match="keep at least"):
        core.resize_kv(4)
    assert core.kv_memory.num_blocks == BLOCKS and core.scheduler.preemptions == 0


def test_a_cache_that_was_allocated_at_once_preempts_nobody() -> None:
    core = tiny_engine()
    core.scheduler.add(requests()[0])
    core.step()
    with pytest.raises(ConfigError, match="allocated at once"):
        core.resize_kv(100)
    assert core.scheduler.preemptions == 0


def test_out_of_memory_while_growing_changes_nothing() -> None:
    memory = FakeVirtualMemory(capacity=1 << 20)
    core = tiny_engine(num_blocks=BLOCKS, memory=memory)
    before = core.kv_memory.num_blocks
    with pytest.raises(ConfigError, match="the device does not have"):
        core.resize_kv(BLOCKS)
    assert core.kv_memory.num_blocks == before == core.scheduler.pool.capacity + 1


def test_verify_stays_within_the_blocks_there_are(device: torch.device) -> None:
    core, memory = engine(device, max_num_seqs=4, chunk_tokens=32)
    core.resize_kv(80)
    assert core.verify().ok and intact(core, memory) and core.kv_memory.num_blocks == 80
    core.resize_kv(4)
    assert core.verify().ok and intact(core, memory) and core.kv_memory.num_blocks == 4


def test_verify_finds_room_beside_a_cache_that_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeVirtualMemory()
    core = tiny_engine(num_blocks=BLOCKS, memory=memory, max_num_seqs=4, chunk_tokens=32)
    core.resize_kv(BLOCKS)
    full, used = memory.used, []
    verify = core.runner.verify

    def watched(*args: object, **options: object) -> object:
        used.append(memory.used)
        return verify(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(core.runner, "verify", watched)
    assert core.verify().ok and used[0] < full == memory.used


def test_a_rehearsal_of_the_largest_step_leaves_nothing_behind(device: torch.device) -> None:
    core, memory = engine(device)
    core.run_largest_step()
    assert intact(core, memory) and not core.runner.stats.steps
    core.resize_kv(BLOCKS)
    assert run_all(core, requests()) == run_all(tiny_engine(device), requests())


@pytest.mark.parametrize("nonsense", [50.0, 10.5, "9", None, True])
def test_what_is_no_number_of_blocks_changes_nothing(nonsense: object) -> None:
    core, memory = engine(torch.device("cpu"))
    core.resize_kv(100)
    with pytest.raises(ConfigError, match="is not a whole number"):
        core.resize_kv(nonsense)  # type: ignore[arg-type]
    assert core.kv_memory.num_blocks == 100 and core.scheduler.pool.capacity == 99 and intact(core, memory)
    assert run_all(core, requests(5)) == run_all(tiny_engine(), requests(5))


def test_verify_tells_even_where_the_cache_cannot_grow_back(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else takes the memory meanwhile; what is left of it becomes blocks."""
    core, memory = engine(torch.device("cpu"))
    core.resize_kv(BLOCKS)
    assert isinstance(memory, FakeVirtualMemory)
    verified, block = len(core._verified()["kv_cache"]) + 1, core.kv_memory.block_bytes
    assert verified < BLOCKS - 20
    inner = core.runner.verify

    def verify(*args: object, **kwargs: object) -> object:
        memory.capacity = memory.used + 10 * block
        return inner(*args, **kwargs)  # type: ignore[arg-type]

    core.runner.verify = verify  # type: ignore[method-assign]
    assert core.verify().ok
    assert verified + 9 <= core.kv_memory.num_blocks <= verified + 11 and "has no room" in caplog.text
    assert core.scheduler.pool.capacity == core.kv_memory.num_blocks - 1 and intact(core, memory)


def test_a_step_that_nobody_can_ever_take_is_refused() -> None:
    core, _ = engine(torch.device("cpu"))
    core.resize_kv(4)
    core.scheduler.add(request(1, [1] * 60))
    with pytest.raises(RequestError, match="request 1 needs 4 KV blocks and the cache has 3"):
        core.step()
