"""Steps launched before the last one's tokens are read: the same tokens, and what has ended disturbs nobody."""

import random
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from engine.test_modes import eager_tokens, graphs_of, serve
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine

from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.request import Request
from stepgraph.ops.sampling import sample_chain
from stepgraph.runtime import Ladder, ReplayError

MODES = ["full", "breakable", "disabled", "prefill only", "short decode ladder", "few request slots"]


def run_ahead(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    """As `run_all`, with every step launched before the one in front is read."""
    for one in requests:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        for one, _ in core.step_ahead():
            finish(core, one)
    return [one.output for one in requests]


def requests_for(count: int, seed: int = 1, longest: int = 40, most: int = 24, **params: float) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [request(id, text, rng.randint(1, most), seed=id * 7 + 1, **params) for id, text in enumerate(prompts)]


@pytest.mark.parametrize("name", MODES)
def test_200_requests_give_the_tokens_of_eager(name: str, device: torch.device) -> None:
    graphs = name if name == "disabled" else graphs_of(name, device)
    core = tiny_engine(device, graphs=graphs, max_num_seqs=16, chunk_tokens=64)
    core.step = core.step_ahead  # type: ignore[method-assign]
    got, want = serve(core, cancel=False)[0], eager_tokens(str(device), cancel=False)
    assert got == want
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


@pytest.mark.parametrize("blocks", [16, 20, 40])
def test_preemption_drops_what_was_on_its_way_and_computes_it_again(blocks: int, device: torch.device) -> None:
    def ours() -> list[Request]:
        penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
        return [
            *requests_for(10, longest=60, most=40, temperature=0.8),
            *(request(100 + i, [i, 2, 3], 40, seed=i, temperature=0.7, **penalised) for i in range(10)),
        ]

    tight = tiny_engine(device, num_blocks=blocks)
    got = run_ahead(tight, ours())
    assert got == run_all(tiny_engine(device), ours())
    assert tight.scheduler.preemptions > 0
    assert tight.scheduler.pool.num_free == tight.scheduler.pool.capacity


def test_the_next_step_is_launched_before_a_token_is_read(device: torch.device) -> None:
    core, order = tiny_engine(device), []
    runner, read = core.runner, core._flights.read

    class Launches:
        def __call__(self, **call: object) -> object:
            order.append("launch")
            return runner(**call)

        def again(self) -> object:
            order.append("launch again")
            return runner.again()

    def reading() -> object:
        order.append("read")
        return read()

    core.runner, core._flights.read = Launches(), reading  # type: ignore[assignment, method-assign]
    got = run_ahead(core, [request(0, [1, 2, 3], 6)])
    again = ["launch again", "read"] * 4
    assert order == ["launch", "launch", "read", *again, "read"] and [len(tokens) for tokens in got] == [6]


@cache
def free_tokens(device: str) -> list[list[int]]:
    return run_all(tiny_engine(device), requests_for(12, most=40, temperature=0.9))


def stopping(device: torch.device) -> tuple[list[Request], list[list[int]]]:
    """Requests that each stop at a token of their own, and their tokens."""
    free, ours, want = free_tokens(str(device)), requests_for(12, most=40, temperature=0.9), []
    for one, tokens in zip(ours, free, strict=True):
        at = len(tokens) // 2
        one.stops = frozenset([tokens[at]])
        want.append(tokens[: tokens.index(tokens[at]) + 1])
    return ours, want


def serve_stops(core: EngineCore, requests: list[Request], *, remove_late: int = 0) -> int:
    """remove_late: steps after which an ended request is removed. Returns the steps."""
    for one in requests:
        core.scheduler.add(one)
    ended: list[tuple[Request, int]] = []
    steps = 0
    while core.scheduler.has_work:
        produced = core.step_ahead()
        steps += 1
        ended += [(one, steps) for one, token in produced if token in one.stops or len(one.output) == one.max_tokens]
        for one, at in list(ended):
            if steps - at >= remove_late:
                core.scheduler.remove(one)
                ended.remove((one, at))
    return steps


@pytest.mark.parametrize("remove_late", [0, 1, 5])
def test_a_stop_token_ends_the_row_on_the_device(remove_late: int, device: torch.device) -> None:
    ours, want = stopping(device)
    core = tiny_engine(device)
    serve_stops(core, ours, remove_late=remove_late)
    assert [one.output for one in ours] == want
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


def test_an_early_end_costs_one_row_step_and_that_writes_the_null_block(device: torch.device) -> None:
    """The one row ends by a stop token in step n; step n + 1 was launched, and touches block 0 alone."""
    core = tiny_engine(device)
    (free,) = run_all(core, [request(0, [5, 6], 20, seed=3, temperature=0.9)])
    at = next(i for i in range(6, 20) if free[i] not in free[:i])
    one = request(1, [5, 6], 20, seed=3, temperature=0.9)
    one.stops = frozenset([free[at]])
    core.scheduler.add(one)
    while len(one.output) < at:
        core.step_ahead()
    before, steps = core.kv_cache.clone(), core.runner.stats.steps
    assert list(core.step_ahead()) == [(one, free[at])] and one.ended
    assert core.buffers["seq_lens"][0] == core.buffers["positions"][0] == 0
    assert torch.equal(core.kv_cache[1:], before[1:]) and not torch.equal(core.kv_cache[0], before[0])
    assert list(core.step_ahead()) == [] and core.runner.stats.steps == steps + 1
    core.scheduler.remove(one)
    assert list(core.step_ahead()) == [] and core.runner.stats.steps == steps + 1
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


def test_ids_beyond_the_devices_room_end_it_on_the_host(device: torch.device) -> None:
    (free,) = run_all(tiny_engine(device), [request(0, [5, 6], 30, seed=3, temperature=0.9)])
    others = [token for token in range(CONFIG.vocab_size) if token not in free[:10]][:12]
    one = request(0, [5, 6], 30, seed=3, temperature=0.9)
    one.stops = frozenset([*others, max(free[8:12])])
    serve_stops(tiny_engine(device), [one])
    assert one.output == free[: next(i for i, token in enumerate(free) if token in one.stops) + 1]


def test_requests_cancelled_while_a_token_is_on_its_way_disturb_nobody(device: torch.device) -> None:
    rng, core = random.Random(4), tiny_engine(device, num_blocks=60)
    ours = requests_for(60, longest=60, most=40, temperature=0.8)
    waiting, cancelled = list(ours), set()
    while waiting or core.scheduler.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 3]), len(waiting))):
            core.scheduler.add(waiting.pop(0))
        produced = core.step_ahead()
        for one, _ in produced:
            if not finish(core, one) and rng.random() < 0.02:
                cancelled.add(one.id)
                core.scheduler.remove(one)
    want = run_all(tiny_engine(device), requests_for(60, longest=60, most=40, temperature=0.8))
    assert len(cancelled) > 5
    for one, tokens in zip(ours, want, strict=True):
        assert one.output == (tokens[: len(one.output)] if one.id in cancelled else tokens)


class FailsOnce:
    """A runner whose call of this number fails, before the step or after it."""

    def __init__(self, runner: object, at: int, after: bool) -> None:
        self._runner, self._left, self._after = runner, at, after

    def __call__(self, **call: object) -> object:
        return self._run(partial(self._runner, **call))  # type: ignore[arg-type]

    def again(self) -> object:
        return self._run(self._runner.again)  # type: ignore[attr-defined]

    def _run(self, run: Callable[[], object]) -> object:
        self._left -= 1
        if self._left == 0 and self._after:
            run()
        if self._left == 0:
            raise ReplayError("moved")
        return run()


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_failed_is_told_everything_again(after: bool, device: torch.device) -> None:
    """With a token on its way, which is read first."""

    def ours() -> list[Request]:
        return [request(i, [i, 3, 5], 3 if i == 0 else 12, i, temperature=0.3 + i) for i in range(4)]

    right = run_all(tiny_engine(device), ours())
    for fail_at in range(1, 10):
        core, mine, failed = tiny_engine(device), ours(), 0
        core.runner = FailsOnce(core.runner, fail_at, after)  # type: ignore[assignment]
        for one in mine:
            core.scheduler.add(one)
        while core.scheduler.has_work:
            try:
                produced = core.step_ahead()
            except ReplayError:
                failed += 1
                continue
            for one, _ in produced:
                finish(core, one)
        assert failed == 1 and [one.output for one in mine] == right, fail_at


@pytest.mark.parametrize("what", ["recapture", "largest step", "step", "lazy"])
def test_whatever_comes_between_two_steps(what: str, device: torch.device) -> None:
    core = tiny_engine(device)
    ours = requests_for(9, temperature=0.7)
    want = run_all(tiny_engine(device), requests_for(9, temperature=0.7))
    for one in ours:
        core.scheduler.add(one)
    count = 0
    with torch.inference_mode():
        while core.scheduler.has_work:
            count += 1
            produced = core.step() if what == "step" and count % 3 == 0 else core.step_ahead()
            for one, _ in produced:
                finish(core, one)
            if count % 5 == 0:
                act = {"recapture": core.runner.recapture, "largest step": core.run_largest_step}
                act.get(what, core.capture_pending)()
    assert [one.output for one in ours] == want


@pytest.mark.parametrize("sampler", [None, sample_chain])
def test_penalties_move_with_their_rows_on_the_device(sampler, device: torch.device) -> None:
    def ours() -> list[Request]:
        settings = [{"repetition_penalty": 1.4}, {}, {"frequency_penalty": 0.6, "temperature": 1.2, "top_k": 20}]
        rng = random.Random(3)
        return [
            request(i, [rng.randrange(97) for _ in range(rng.randint(1, 30))], rng.randint(2, 30), i, **settings[i % 3])
            for i in range(40)
        ]

    options = {} if sampler is None else {"sampler": sampler}
    assert run_ahead(tiny_engine(device, **options), ours()) == run_all(tiny_engine(device, graphs="disabled"), ours())


def test_blocks_are_there_before_they_are_needed(device: torch.device) -> None:
    """Between two writes to the block tables lie sixteen steps, for all rows together."""
    core = tiny_engine(device, max_num_seqs=13, ladder=Ladder.explicit([13]))
    for id in range(13):
        core.scheduler.add(request(id, list(range(1 + id)), max_tokens=150))
    while core.scheduler.waiting or core.scheduler.prefilling or len(core.scheduler.rows) < 13:
        core.step_ahead()
    for _ in range(20):
        core.step_ahead()
    writes: list[int] = []
    put = core.buffers.put

    def counted(name: str, *entries: object) -> None:
        writes.append(core.runner.stats.steps)
        put(name, *entries)  # type: ignore[arg-type]

    core.buffers.put = counted  # type: ignore[method-assign]
    for _ in range(64):
        assert len(core.step_ahead()) == 13
        for one in core.scheduler.rows:
            assert len(one.blocks) >= blocks_for(one.num_tokens)  # with the token that is on its way
    assert [after - before for before, after in zip(writes, writes[1:], strict=False)] == [16] * (len(writes) - 1)
    assert 3 <= len(writes) <= 5


@pytest.mark.parametrize("seed", [7, 11])
def test_who_has_ended_and_is_preempted_gets_no_further_token(seed: int, device: torch.device) -> None:
    """A request that ended is removed late, and gives its blocks to an older one meanwhile."""

    def ours() -> list[Request]:
        return requests_for(10, seed=seed, longest=60, most=60, temperature=0.9)

    free, mine, want = run_all(tiny_engine(device), ours()), ours(), []
    for one, tokens in zip(mine, free, strict=True):
        end = tokens[len(tokens) // 2]
        one.stops = frozenset([end])
        want.append(tokens[: tokens.index(end) + 1])
    core = tiny_engine(device, num_blocks=14)
    serve_stops(core, mine, remove_late=12)
    assert core.scheduler.preemptions > 0 and core.scheduler.pool.num_free == core.scheduler.pool.capacity
    assert [one.output for one in mine] == want


def test_an_interrupted_plan_is_told_again(device: torch.device) -> None:
    """Rows were given blocks, and the device had not heard of them."""
    right = run_all(tiny_engine(device), requests_for(10, longest=60, most=40, temperature=0.7))
    core, mine = tiny_engine(device, num_blocks=30), requests_for(10, longest=60, most=40, temperature=0.7)
    grow, interrupted = core.scheduler.grow, []

    def interrupted_behind(*arguments):
        grown = grow(*arguments)
        if grown and len(interrupted) < 4:
            interrupted.append(grown)
            raise KeyboardInterrupt
        return grown

    core.scheduler.grow = interrupted_behind  # type: ignore[method-assign]
    for one in mine:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        try:
            produced = core.step_ahead()
        except KeyboardInterrupt:
            continue
        for one, _ in produced:
            finish(core, one)
    assert len(interrupted) == 4
    assert [one.output for one in mine] == right


@pytest.mark.parametrize("share", [0, 2, 5])
def test_an_interrupt_amid_reading_loses_no_token_and_gives_none_twice(share: int, device: torch.device) -> None:
    """So many of five requests have the step's token by then."""

    def ours() -> list[Request]:
        return [request(id, [id, 3], 20 + id, seed=id, temperature=0.7) for id in range(5)]

    core, mine, calls = tiny_engine(device), ours(), []
    take = core._flights._take

    def interrupted(takers, step, changes, told):
        calls.append(step)
        if len(calls) in (3, 9):
            for output, token in zip(takers.outputs[:share], told.tolist(), strict=False):
                output.append(token)
            raise KeyboardInterrupt
        return take(takers, step, changes, told)

    core._flights._take = interrupted  # type: ignore[method-assign]
    for one in mine:
        core.scheduler.add(one)
    interrupts = 0
    while core.scheduler.has_work:
        try:
            core.step_ahead()
        except KeyboardInterrupt:
            interrupts += 1
        for one in list(core.scheduler.rows):
            finish(core, one)
    assert interrupts == 2 and [one.output for one in mine] == run_all(tiny_engine(device), ours())
