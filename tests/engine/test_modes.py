"""Every backend gives the tokens of eager: 200 requests with random lengths that join, leave, and share steps."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from engine.tiny import CONFIG, finish, request, tiny_engine, tiny_graphs

from stepgraph.runtime import Backend, DecodePhase, GraphConfig, Ladder, PrefillPhase

COUNT, ROWS, CHUNK = 200, 16, 64


def serve(core, *, cancel: bool = True) -> tuple[list[list[int]], int]:
    """All requests to their end, or until they are cancelled; each one's tokens, and the steps that it took."""
    rng = random.Random(7)
    requests = []
    for id in range(COUNT):
        prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.choice([1, 2, rng.randint(3, 30), 100]))]
        sampling = rng.choice([{}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20, "repetition_penalty": 1.3}])
        requests.append(request(id, prompt, rng.randint(1, 20), seed=id * 7 + 1, **sampling))
    waiting, steps = list(requests), 0
    while waiting or core.scheduler.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 3]), len(waiting))):
            core.scheduler.add(waiting.pop(0))
        produced = core.step()
        steps += bool(produced or core.scheduler.prefilling)
        for one, _ in produced:
            if not finish(core, one) and rng.random() < 0.01 * cancel:
                core.scheduler.remove(one)  # cancelled
    return [one.output for one in requests], steps


@cache
def eager_tokens(device: str, operations: str | None = None, *, cancel: bool = True) -> list[list[int]]:
    core = tiny_engine(device, graphs="disabled", max_num_seqs=ROWS, chunk_tokens=CHUNK, operations=operations)
    return serve(core, cancel=cancel)[0]


def graphs_of(name: str, device) -> GraphConfig:
    full = tiny_graphs("full", device=device, max_num_seqs=ROWS, chunk_tokens=CHUNK)
    if name == "prefill only":  # every decode step takes a relaxed key
        return replace(full, decode=DecodePhase())
    if name == "short decode ladder":  # those of more than 4 requests do
        return replace(full, decode=DecodePhase(Backend.FULL, Ladder.explicit([2, 4])))
    if name == "few request slots":
        return replace(full, prefill=replace(full.prefill, max_requests=3))
    if name == "as many tokens as requests":  # where shapes do not tell the phases apart
        sizes = Ladder.explicit([*range(1, ROWS + 1), 32, 64])
        return replace(full, decode=DecodePhase(), prefill=PrefillPhase(Backend.FULL, sizes))
    if name in ("eager-through-graph", "break-every-op"):
        return replace(full, debug=name)
    if name == "piecewise":
        return tiny_graphs(name, device=device, max_num_seqs=ROWS, chunk_tokens=CHUNK, compile="aot_eager")
    return tiny_graphs(name, device=device, max_num_seqs=ROWS, chunk_tokens=CHUNK)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("full", {"FULL"}),
        ("breakable", {"BREAKABLE"}),
        ("piecewise", {"PIECEWISE"}),
        ("disabled", {"EAGER"}),
        ("FULL_AND_PIECEWISE", {"FULL", "BREAKABLE"}),
        ("FULL_DECODE_ONLY", {"FULL", "EAGER"}),
        ("prefill only", {"FULL"}),
        ("short decode ladder", {"FULL"}),
        ("few request slots", {"FULL", "EAGER"}),
        ("as many tokens as requests", {"FULL"}),
        ("eager-through-graph", {"BREAKABLE"}),
        ("break-every-op", {"BREAKABLE"}),
    ],
)
def test_200_requests_give_the_tokens_of_eager(device, name: str, modes: set[str]) -> None:
    graphs = graphs_of(name, device)
    operations = None if graphs.compile == "off" else "reference"  # whose kernels a compiler sees
    core = tiny_engine(device, graphs=graphs, max_num_seqs=ROWS, chunk_tokens=CHUNK, operations=operations)
    tokens, steps = serve(core)
    assert tokens == eager_tokens(str(device), operations)
    stats = core.runner.stats
    assert stats.compiles == 0
    assert set(stats.by_mode()) == modes
    assert stats.steps == steps == sum(stats.by_mode().values()) == sum(stats.by_reason().values())
    routes = stats.routes()
    assert sum(route["steps"] for route in routes) == steps
    assert {route["kind"] for route in routes} == {"uniform", "mixed"}
    if name in ("prefill only", "as many tokens as requests"):
        assert {route["reason"] for route in routes if route["kind"] == "uniform"} == {"relaxed"}
    if name == "short decode ladder":
        taken = {route["reason"]: route["padded"] for route in routes if route["kind"] == "uniform"}
        assert taken["padded"] <= 4 < taken["relaxed"]
    assert core.scheduler.pool.num_free == core.scheduler.pool.capacity
