"""500 requests with a cache for a tenth of them: all finish, as they would alone, and the youngest gives way."""

import random

import torch
from engine.tiny import CONFIG, request, run_all, tiny_engine

from stepgraph.engine.kv_blocks import blocks_for

TIE = 1e-3


def longest_need(requests) -> int:
    return sum(blocks_for(len(one.prompt) + one.max_tokens) for one in requests)


def make_requests(rng: random.Random, count: int):
    return [
        request(
            id,
            [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 100))],
            rng.randint(1, 30),
            seed=id,
            temperature=rng.choice([0.0, 0.8]),
        )
        for id in range(count)
    ]


@torch.inference_mode()
def gap_after(core, prompt: list[int], token: int) -> float:
    """By how much a greedy choice after `prompt` is preferred to `token`, in logits."""
    one = request(0, prompt, 1)
    seen: list[torch.Tensor] = []
    logits = core.model.logits
    core.model.logits = lambda *args: seen.append(logits(*args)) or seen[-1]
    try:
        run_all(core, [one])
    finally:
        core.model.logits = logits
    return float(seen[0][0].max() - seen[0][0, token])


def test_500_requests_with_blocks_for_a_tenth(device) -> None:
    count = 500 if device.type == "cpu" else 100  # alone, one by one, they take minutes on a GPU
    requests = make_requests(random.Random(0), count)
    core = tiny_engine(device, max_num_seqs=100, num_blocks=longest_need(requests) // 10 + 1, chunk_tokens=512)
    scheduler, victims = core.scheduler, []
    preempt = scheduler._preempt

    def checked(victim) -> None:
        youngest = max(one.id for one in scheduler.rows + scheduler.prefilling)
        victims.append(victim.id)
        assert victim.id == youngest
        preempt(victim)

    scheduler._preempt = checked
    got = run_all(core, requests)
    assert len(victims) > 0 and scheduler.pool.num_free == scheduler.pool.capacity
    assert [len(tokens) for tokens in got] == [one.max_tokens for one in requests]

    alone_core = tiny_engine(device, max_num_seqs=1)
    ties = 0
    for one, tokens in zip(make_requests(random.Random(0), count), got, strict=True):
        (alone,) = run_all(alone_core, [one])
        if alone == tokens:
            continue
        ties += 1
        first = next(i for i, (a, b) in enumerate(zip(alone, tokens, strict=True)) if a != b)
        if one.params.temperature == 0:
            assert gap_after(alone_core, one.prompt + tokens[:first], tokens[first]) < TIE
    assert ties <= 5
