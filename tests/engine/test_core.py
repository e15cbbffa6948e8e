"""The engine's step on a tiny random model: graphs, joins, leaves, padding, preemption."""

import random

import pytest
import torch
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine

from stepgraph.runtime import Ladder, ReplayError


def prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def requests_for(texts: list[list[int]], max_tokens: int = 12, **params: float):
    return [request(id, text, max_tokens, seed=id * 7 + 1, **params) for id, text in enumerate(texts)]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9}])
def test_graphs_and_eager_give_the_same_tokens(device, params) -> None:
    texts = prompts(random.Random(0), 13)
    graphs, eager = tiny_engine(device), tiny_engine(device, graphs="disabled")
    assert run_all(graphs, requests_for(texts, **params)) == run_all(eager, requests_for(texts, **params))
    assert set(graphs.runner.stats.by_mode()) == {"FULL"} and set(eager.runner.stats.by_mode()) == {"EAGER"}


def test_chunked_prefill_gives_the_same_tokens(device) -> None:
    texts = prompts(random.Random(1), 6, longest=150)
    small, large = tiny_engine(device, chunk_tokens=17), tiny_engine(device, chunk_tokens=1000)
    assert run_all(small, requests_for(texts)) == run_all(large, requests_for(texts))


class Refusing:
    """Stands in for a runner."""

    def __call__(self, **inputs: object) -> None:
        raise ReplayError("moved")

    def again(self) -> None:
        raise ReplayError("moved")


def test_a_step_that_failed_is_told_everything_again(device) -> None:
    """A request takes another's row, and the step that is to know it fails before, or in, the graph."""

    def serve(fail_at: int | None) -> list[list[int]]:
        core = tiny_engine(device)
        texts = prompts(random.Random(5), 3)
        ours = [request(i, text, 3 if i == 0 else 12, i, temperature=0.3 + i) for i, text in enumerate(texts)]
        for one in ours:
            core.scheduler.add(one)
        runner, steps = core.runner, 0
        while core.scheduler.has_work:
            steps += 1
            if steps == fail_at:
                core.runner = Refusing()  # type: ignore[assignment]
                with pytest.raises(ReplayError):
                    core.step()
                core.runner = runner
            for one, _ in core.step():
                finish(core, one)
        return [one.output for one in ours]

    right = serve(None)
    for step in range(1, 8):
        assert serve(step) == right


def test_preempted_requests_end_with_the_same_tokens(device) -> None:
    texts = prompts(random.Random(2), 20, longest=60)
    tight, roomy = tiny_engine(device, num_blocks=16), tiny_engine(device)
    got = run_all(tight, requests_for(texts, 40, temperature=0.8))
    assert tight.scheduler.preemptions > 0 and got == run_all(roomy, requests_for(texts, 40, temperature=0.8))
    assert tight.scheduler.pool.num_free == tight.scheduler.pool.capacity


@pytest.mark.parametrize("ladder", [Ladder.vllm(16), Ladder.sglang(16)], ids=["vllm", "sglang"])
def test_2000_replays_with_joins_and_leaves(ladder: Ladder, device) -> None:
    """Rule 3, every step: no stale row, padded rows on block 0, the cache of real rows touched by nobody else."""
    rng = random.Random(3)
    core = tiny_engine(device, ladder=ladder, num_blocks=300)
    waiting = [request(id, text, rng.randint(1, 30)) for id, text in enumerate(prompts(rng, 1500))]
    every = list(waiting)
    nine_rows_took = set()
    while core.runner.stats.steps < 2000:
        while waiting and len(core.scheduler.waiting) < 2 and rng.random() < 0.5:
            core.scheduler.add(waiting.pop(0))
        before = core.kv_cache.clone() if core.runner.stats.steps % 100 == 0 else None
        rows = list(core.scheduler.rows)
        written = [(one, list(one.blocks), one.num_tokens - 1) for one in rows]
        produced = core.step()
        check_rows(core)
        if before is not None:
            check_untouched(core, before, every)
            check_kept(core, before, written)
        if len(rows) == 9:
            nine_rows_took.add(core.runner.coverage()[8].padded)
        for one, _ in produced:
            if not finish(core, one) and rng.random() < 0.01:
                core.scheduler.remove(one)  # cancelled
    assert nine_rows_took == {12 if ladder.rule == "sglang" else 16}
    assert core.runner.stats.by_mode() == {"FULL": 2000}


def check_rows(core) -> None:
    rows, staged = core.scheduler.rows, core.buffers.staged
    live = 0 if staged is None else staged[0].num_reqs  # the last may be in the middle of its prompt
    state = {name: core.buffers[name] for name in ("tokens", "positions", "seq_lens", "block_tables")}
    for name, value in state.items():
        assert value[live:].eq(0).all(), f"{name} holds stale rows behind {live}"
    assert live - len(rows) in (0, 1)
    assert state["tokens"][: len(rows)].tolist() == [one.last_token for one in rows]
    assert state["seq_lens"][: len(rows)].tolist() == [0 if one.ended else one.num_tokens for one in rows]


def check_untouched(core, before: torch.Tensor, every) -> None:
    """Blocks that no request holds, but the null block, are as before the step."""
    held = {block for one in every for block in one.blocks}
    free = [block for block in range(1, before.shape[0]) if block not in held]
    freed_in_this_step = core.scheduler.preemptions  # none in this run: blocks suffice
    assert freed_in_this_step == 0 and torch.equal(core.kv_cache[free], before[free])


def check_kept(core, before: torch.Tensor, written) -> None:
    """The keys and values that rows had before the step are as they were: nobody else wrote there."""
    for one, blocks, computed in written:
        if one.blocks[: len(blocks)] != blocks:
            continue  # finished meanwhile
        for position in range(computed):
            block, offset = blocks[position // 16], position % 16
            assert torch.equal(core.kv_cache[block, :, :, offset], before[block, :, :, offset])


def test_poison_in_the_null_block_and_in_padded_rows_changes_nothing(device) -> None:
    texts = prompts(random.Random(4), 5)
    clean = run_all(tiny_engine(device), requests_for(texts))
    core = tiny_engine(device)
    core.kv_cache.fill_(float("nan"))  # the null block and every unused slot
    assert run_all(core, requests_for(texts)) == clean


def test_sampling_is_the_same_whatever_the_batch_around_it(device) -> None:
    texts = prompts(random.Random(5), 13)
    together = run_all(tiny_engine(device), requests_for(texts, temperature=0.8, top_p=0.95))
    core = tiny_engine(device)
    alone = [run_all(core, [one])[0] for one in requests_for(texts, temperature=0.8, top_p=0.95)]
    assert together == alone


def test_sampled_steps_differ_and_a_seed_repeats_them(device) -> None:
    """Rule 8."""
    core = tiny_engine(device)
    first = run_all(core, [request(0, [1, 2, 3], 20, seed=1, temperature=2.0)])[0]
    again = run_all(core, [request(1, [1, 2, 3], 20, seed=1, temperature=2.0)])[0]
    other = run_all(core, [request(2, [1, 2, 3], 20, seed=2, temperature=2.0)])[0]
    assert first == again != other and len(set(first)) > 5


def test_capture_leaves_the_cache_alone_but_for_the_null_block(device) -> None:
    assert tiny_engine(device).kv_cache[1:].eq(0).all()


def test_a_weight_that_moved_is_refused_by_name(device) -> None:
    core = tiny_engine(device)
    run_all(core, [request(0, [1, 2, 3])])
    core.model.final_norm = core.model.final_norm.clone()
    with pytest.raises(ReplayError, match=r"model\.final_norm from"):
        core.runner.check_addresses()
    core = tiny_engine(device)
    core.model.layers[1].down.data = core.model.layers[1].down.clone()
    with pytest.raises(ReplayError, match=r"model\.layers\.1\.down from"):
        core.runner.check_addresses()


def steps_with(core, requests, at: int, act) -> list[list[int]]:
    """As `run_all`, with `act` between two steps."""
    for one in requests:
        core.scheduler.add(one)
    count = 0
    while core.scheduler.has_work:
        for one, _ in core.step():
            finish(core, one)
        count += 1
        if count == at:
            act()
    return [one.output for one in requests]


@pytest.mark.parametrize("what", ["recapture", "release and capture", "largest step"])
def test_requests_go_on_over_whatever_resets_the_buffers(what: str, device: torch.device) -> None:
    def requests():
        return [request(i, [3 + i, 5, 7 * i % 90], max_tokens=12 + i, seed=i, temperature=0.7) for i in range(5)]

    core = tiny_engine(device)

    def act() -> None:
        if what == "recapture":
            core.runner.recapture()
        elif what == "largest step":
            core.run_largest_step()
        else:
            core.runner.release()
            core.capture()

    with torch.inference_mode():
        expected = run_all(tiny_engine(device), requests())
        assert steps_with(core, requests(), 6, act) == expected
