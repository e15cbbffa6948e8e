"""Penalties in the engine: the counts follow every row, and tokens do not depend on what happens around a request."""

import random
from pathlib import Path

import pytest
import torch
from engine.hf import greedy, write_checkpoint
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine

from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.errors import RequestError
from stepgraph.engine.sampling_state import mark_rows
from stepgraph.ops.sampling import mark_seen, sample_chain
from stepgraph.runtime.platforms import platform_for

PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "temperature": 0.9},
    {"frequency_penalty": 0.6, "repetition_penalty": 0.9, "temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.8},
    {},
]


def penalised_requests(count: int, max_tokens: int = 24, longest: int = 40):
    """Rows with and without penalties next to each other."""
    rng = random.Random(1)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [
        request(id, prompt, max_tokens, seed=id * 7 + 1, **PENALTIES[id % len(PENALTIES)])
        for id, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_greedy_with_a_repetition_penalty_is_transformers(checkpoint: Path, graphs: str) -> None:
    llm = LLM(checkpoint, device="cpu", graphs=graphs, max_num_seqs=3)
    prompts = [[1, 2, 3], list(range(40)), [7]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.6)
    got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert got == [greedy(checkpoint, prompt, 30, repetition_penalty=1.6) for prompt in prompts]
    assert got != [greedy(checkpoint, prompt, 30) for prompt in prompts]


def test_a_request_for_penalties_where_they_are_off_says_how_to_have_them(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", max_num_seqs=2, penalties=False)
    assert "seen" not in llm.core.buffers.slots
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        with pytest.raises(RequestError, match=r"prompt 1 asks for a penalty, .* use LLM\(penalties=True\)"):
            llm.generate(["fine", "not"], [SamplingParams(), SamplingParams(**{name: 0.5})])
    assert not llm.core.scheduler.has_work
    assert llm.generate("fine", SamplingParams(min_p=0.1, max_tokens=3, ignore_eos=True))[0].finished


def test_graphs_eager_and_the_chain_give_the_same_tokens(device) -> None:
    graphs = run_all(tiny_engine(device), penalised_requests(13))
    assert graphs == run_all(tiny_engine(device, graphs="disabled"), penalised_requests(13))
    assert graphs == run_all(tiny_engine(device, sampler=sample_chain), penalised_requests(13))


def test_penalties_do_what_they_are_for(device) -> None:
    core = tiny_engine(device)
    free = run_all(core, [request(0, [5, 6], 60)])[0]
    varied = run_all(core, [request(1, [5, 6], 60, frequency_penalty=2.0, presence_penalty=2.0)])[0]
    assert len(set(varied)) > len(set(free))


def test_tokens_do_not_depend_on_the_batch_around_them(device) -> None:
    together = run_all(tiny_engine(device), penalised_requests(13))
    core = tiny_engine(device)
    assert together == [run_all(core, [one])[0] for one in penalised_requests(13)]


def test_preempted_requests_count_again_what_they_had(device) -> None:
    tight, roomy = tiny_engine(device, num_blocks=16), tiny_engine(device)
    got = run_all(tight, penalised_requests(20, 40, 60))
    assert tight.scheduler.preemptions > 0 and got == run_all(roomy, penalised_requests(20, 40, 60))


def test_counts_follow_joins_leaves_and_moves(device) -> None:
    rng = random.Random(2)
    core = tiny_engine(device, num_blocks=20)
    waiting = penalised_requests(60)
    steps = checked = 0
    while waiting or core.scheduler.has_work:
        while waiting and len(core.scheduler.waiting) < 2 and rng.random() < 0.5:
            core.scheduler.add(waiting.pop(0))
        rows = list(core.scheduler.rows)
        produced = core.step()
        if steps % 3 == 0:
            checked += check_counts(core, rows)
        for one, _ in produced:
            if not finish(core, one) and rng.random() < 0.03:
                core.scheduler.remove(one)  # cancelled
        steps += 1
    assert core.scheduler.preemptions > 0 and checked > 50


def check_counts(core, rows) -> int:
    """Rows that were decoded and are still where they were; how many."""
    expected, checked = torch.empty(CONFIG.vocab_size, dtype=torch.int32), 0
    for row, one in enumerate(rows):
        if one.params.penalises and row < len(core.scheduler.rows) and core.scheduler.rows[row] is one:
            mark_seen(expected, torch.tensor(one.prompt), torch.tensor(one.output))
            assert torch.equal(core.buffers["seen"][row].cpu(), expected)
            checked += 1
    return checked


def test_a_row_keeps_no_count_of_a_request_before_it(device) -> None:
    core = tiny_engine(device)
    fresh = run_all(core, [request(0, [9], 20, frequency_penalty=1.0)])[0]
    run_all(core, [request(1, list(range(50)), 30, frequency_penalty=-2.0)])
    assert run_all(core, [request(2, [9], 20, frequency_penalty=1.0)])[0] == fresh


@pytest.mark.gpu
def test_the_host_does_not_wait_for_counts_to_be_written() -> None:
    platform, requests = platform_for("cuda"), penalised_requests(5)
    seen = torch.ones(5, CONFIG.vocab_size, dtype=torch.int32, device="cuda")
    requests[0].output += [3, 4, 3]
    torch.cuda.set_sync_debug_mode("error")
    try:
        mark_rows(platform, seen, requests, range(5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen[0, 3] >= 4 and seen[4].eq(1).all()
