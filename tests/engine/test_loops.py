"""Many steps a launch: the tokens of one by one, in fewer launches, and one by one with a reason where it must be."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.hf import write_checkpoint
from engine.test_ahead import requests_for, stopping
from engine.tiny import finish, request, run_all, tiny_engine, tiny_graphs

from stepgraph.engine import LLM, SamplingParams, loops
from stepgraph.engine.core import EngineCore
from stepgraph.engine.loops import AUTO, steps_ahead
from stepgraph.engine.request import Request
from stepgraph.runtime import ConfigError

REASON = "stop strings, many stop tokens or streaming"


def run_many(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    """As `run_all`, with many steps a launch. Tokens behind a request's end would be in its output."""
    for one in requests:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        for one, token in core.step_many():
            if one.blocks and (token in one.stops or len(one.output) >= one.max_tokens):
                core.scheduler.remove(one)
    return [one.output for one in requests]


@pytest.mark.parametrize("most", [2, 7, 64])
def test_the_tokens_of_one_by_one_in_fewer_launches(most: int, device: torch.device) -> None:
    def ours() -> list[Request]:
        penalised = [request(90 + i, [i, 2], 30, i, repetition_penalty=1.3, temperature=0.7) for i in range(5)]
        return [*requests_for(12, most=60), *requests_for(8, seed=2, most=60, temperature=0.8), *penalised]

    core = tiny_engine(device, steps_per_launch=most)
    assert run_many(core, ours()) == run_all(tiny_engine(device), ours())
    stats = core.runner.stats
    assert 0 < stats.loops < stats.looped_steps < stats.steps
    assert not stats.not_looped and core.scheduler.pool.num_free == core.scheduler.pool.capacity


def test_one_request_takes_a_launch_for_64_tokens(device: torch.device) -> None:
    core = tiny_engine(device, steps_per_launch=64)
    (tokens,) = run_many(core, [request(0, [1, 2, 3], 200, temperature=0.8)])
    assert tokens == run_all(tiny_engine(device), [request(0, [1, 2, 3], 200, temperature=0.8)])[0]
    assert core.runner.stats.loops <= 5 and core.runner.stats.looped_steps >= 195
    assert core.runner.stats.steps == 200


@pytest.mark.parametrize(("rows", "steps"), [(1, 1024), (2, 512), (3, 341), (4, 256), (256, 256)])
def test_few_rows_run_for_longer(rows: int, steps: int) -> None:
    assert steps_ahead(AUTO, rows) == steps
    assert steps_ahead(100, rows) == 100


@pytest.mark.parametrize(("rows", "launches"), [(1, 2), (2, 4), (8, 8)])
def test_launches_of_few_rows_are_fewer(
    rows: int, launches: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "AUTO", 96)
    monkeypatch.setattr(loops, "_FEWEST", 24)
    core = tiny_engine(device, steps_per_launch=AUTO)
    requests = [request(id, [1, 2, id], 193, temperature=0.8) for id in range(rows)]
    assert [len(tokens) for tokens in run_many(core, requests)] == [193] * rows
    assert core.runner.stats.loops == pytest.approx(launches, abs=1)  # a launch runs to the end of a block


@pytest.mark.parametrize("most", [3, 64])
def test_a_stop_token_ends_the_loop(most: int, device: torch.device) -> None:
    ours, want = stopping(device)
    assert run_many(tiny_engine(device, steps_per_launch=most), ours) == want


@pytest.mark.parametrize("blocks", [16, 24, 60])
def test_short_blocks_end_the_loop_and_preempt_as_before(blocks: int, device: torch.device) -> None:
    def ours() -> list[Request]:
        return requests_for(20, longest=60, most=40, temperature=0.8)

    core = tiny_engine(device, steps_per_launch=32, num_blocks=blocks)
    assert run_many(core, ours()) == run_all(tiny_engine(device), ours())
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity


@pytest.mark.parametrize("blocks", [8, 9, 15])
def test_no_step_lacks_a_block_behind_a_launch_that_went_further_than_asked(blocks: int, device: torch.device) -> None:
    def ours() -> list[Request]:
        return [request(id, [1, 2, id], 100, temperature=0.8) for id in range(2)]

    core = tiny_engine(device, steps_per_launch=64, num_blocks=blocks)
    assert run_many(core, ours()) == run_all(tiny_engine(device), ours())


def test_joins_leaves_and_cancels_between_launches(device: torch.device) -> None:
    rng, core = random.Random(4), tiny_engine(device, num_blocks=80, steps_per_launch=8)
    ours = requests_for(60, longest=60, most=40, temperature=0.8)
    waiting, cancelled = list(ours), set()
    while waiting or core.scheduler.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 3]), len(waiting))):
            core.scheduler.add(waiting.pop(0))
        for one, _ in core.step_many():
            if one.blocks and not finish(core, one) and rng.random() < 0.01:
                cancelled.add(one.id)
                core.scheduler.remove(one)
    want = run_all(tiny_engine(device), requests_for(60, longest=60, most=40, temperature=0.8))
    assert len(cancelled) > 3 and core.runner.stats.loops
    for one, tokens in zip(ours, want, strict=True):
        assert one.output == (tokens[: len(one.output)] if one.id in cancelled else tokens)


@pytest.mark.parametrize("blocks", [24, 400])
def test_loops_and_single_steps_in_any_order(blocks: int, device: torch.device) -> None:
    for seed in range(4):
        rng, core = random.Random(seed), tiny_engine(device, num_blocks=blocks, steps_per_launch=40)
        ours = requests_for(8, longest=30, most=120, temperature=0.8)
        for one in ours:
            core.scheduler.add(one)
        while core.scheduler.has_work:
            for one, _ in rng.choice([core.step_many, core.step_ahead, core.step])():
                if one.blocks:
                    finish(core, one)
        want = run_all(tiny_engine(device), requests_for(8, longest=30, most=120, temperature=0.8))
        assert [one.output for one in ours] == want and core.runner.stats.loops


@pytest.mark.parametrize(("graphs", "says"), [("breakable", "one by one"), ("disabled", "runs eagerly")])
def test_where_it_cannot_be_the_reason_is_told_once(graphs: str, says: str, device, caplog) -> None:
    core = tiny_engine(device, graphs=graphs, steps_per_launch=8)
    assert run_many(core, requests_for(6)) == run_all(tiny_engine(device), requests_for(6))
    (reason,) = core.runner.stats.not_looped
    assert says in reason and core.runner.stats.loops == 0
    assert sum("one step a launch" in record.message for record in caplog.records) == 1


def test_graphs_that_come_later_are_looped_then(device: torch.device) -> None:
    """Meanwhile its batches run eagerly, for a reason that passes."""
    lazy = replace(tiny_graphs("full", device=device), lazy=True)
    core = tiny_engine(device, graphs=lazy, steps_per_launch=8)
    first, second = (request(0, [1, 2, 3], 40, seed=id, temperature=0.8) for id in range(2))
    run_many(core, [first])
    (reason,) = core.runner.stats.not_looped
    assert "pending" in reason and core.runner.stats.loops == 0
    core.capture_pending()
    assert [first.output, *run_many(core, [second])] == [
        run_all(tiny_engine(device), [request(0, [1, 2, 3], 40, seed=id, temperature=0.8)])[0] for id in range(2)
    ]
    assert core.runner.stats.loops > 0


def test_a_loop_that_failed_is_told_everything_again(device: torch.device) -> None:
    right = run_all(tiny_engine(device), requests_for(4, temperature=0.7))
    for after in (False, True):
        core, mine = tiny_engine(device, steps_per_launch=8), requests_for(4, temperature=0.7)
        loop, calls = core.runner.loop, []

        def failing(*args, loop=loop, calls=calls, after=after, **call):
            calls.append(1)
            if len(calls) == 2:
                if after:
                    loop(*args, **call)
                raise RuntimeError("interrupted")
            return loop(*args, **call)

        core.runner.loop = failing  # type: ignore[method-assign]
        for one in mine:
            core.scheduler.add(one)
        failed = 0
        while core.scheduler.has_work:
            try:
                produced = core.step_many()
            except RuntimeError:
                failed += 1
                continue
            for one, _ in produced:
                if one.blocks:
                    finish(core, one)
        assert failed == 1 and [one.output for one in mine] == right


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


PROMPTS = [[1, 2, 3], list(range(40)), [7]]


def generate(llm: LLM, **options: object) -> list[tuple[list[int], str, str | None]]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=50, **options)  # type: ignore[arg-type]
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


def test_texts_lengths_and_stops_are_the_same(checkpoint: Path) -> None:
    alone = LLM(checkpoint, device="cpu", max_num_seqs=4)
    many = LLM(checkpoint, device="cpu", max_num_seqs=4, steps_per_launch="auto")
    free = generate(alone)
    assert generate(many) == free and many.stats.loops > 0 and not many.stats.not_looped
    ids = tuple({tokens[20] for tokens, _, _ in free})
    assert generate(many, stop_token_ids=ids) == generate(alone, stop_token_ids=ids)
    more = (*ids, *(token for token in range(256) if all(token not in tokens for tokens, _, _ in free)))[:12]
    for options in ({"stop_token_ids": more}, {"stop": free[0][1][10:12]}):
        before = many.stats.loops
        assert generate(many, **options) == generate(alone, **options)
        assert many.stats.loops == before and set(many.stats.not_looped) == {REASON}


def test_a_stream_takes_its_tokens_one_by_one_unless_a_number_was_asked_for(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = []
    for steps in (1, "auto", 8):
        llm = LLM(checkpoint, device="cpu", max_num_seqs=4, steps_per_launch=steps)
        texts.append("".join(piece.text for piece in llm.stream("ab", params)))
        assert (llm.stats.loops > 0) == (steps == 8)
        assert set(llm.stats.not_looped) == ({REASON} if steps == "auto" else set())
    assert len(set(texts)) == 1


def test_an_abort_in_the_middle_of_a_burst(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", max_num_seqs=4, steps_per_launch=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def stop_the_first(delta) -> None:
        if delta.index == 0:
            llm.abort(delta.request_id)

    first, second = llm.generate(["ab", "cd"], params, stream=stop_the_first)
    assert first.outputs[0].finish_reason == "abort" and len(first.outputs[0].token_ids) < 40
    assert second.outputs[0].token_ids == llm.generate("cd", params)[0].outputs[0].token_ids


@pytest.mark.parametrize("nonsense", [0, -1, 1.5, "many", True, 4097, 10**12])
def test_what_is_no_number_of_steps_is_refused(nonsense: object, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="steps_per_launch"):
        LLM(checkpoint, device="cpu", max_num_seqs=2, steps_per_launch=nonsense)  # type: ignore[arg-type]
