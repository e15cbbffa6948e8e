"""The walk: 13 decodes take the graph of 16 with three rows on the null block; a two-token query the relaxed key."""

from __future__ import annotations

import torch
from engine.tiny import CONFIG, finish, request, run_all, tiny_engine

from stepgraph.runtime import BatchDescriptor, Mode

WALK = "FULL_AND_PIECEWISE"  # decode in one graph, prefill with attention outside of its graphs


def thirteen(max_tokens: int):
    return [request(id, [id + 1] * (id + 2), max_tokens, seed=id) for id in range(13)]


def last_route(core, before: list[dict]) -> dict:
    """How the step ran that was counted since."""
    (route,) = [route for route in core.runner.stats.routes() if route not in before]
    return route


def test_thirteen_decodes_take_the_graph_of_sixteen(device) -> None:
    core, requests = tiny_engine(device, graphs=WALK), thirteen(max_tokens=4)
    for one in requests:
        core.scheduler.add(one)
    while len(core.scheduler.rows) < 13:
        core.step()
    core.kv_cache[0] = float("nan")
    counted, kv = core.runner.stats.routes(), core.kv_cache.clone()
    produced = core.step()
    assert len(produced) == 13
    route = last_route(core, counted)
    assert (route["kind"], route["mode"], route["reason"]) == ("uniform", "FULL", "padded")
    assert (route["real"], route["padded"]) == (13, 16)

    for name in ("tokens", "positions", "seq_lens", "block_tables"):
        assert core.buffers[name][13:16].eq(0).all(), f"{name}: the three padded rows stand on the null block"
    held = {block for one in requests for block in one.blocks}
    free = [block for block in range(1, kv.shape[0]) if block not in held]
    assert torch.equal(core.kv_cache[free], kv[free])
    assert core.kv_cache[0, :, :, 0].isfinite().all()  # where padded rows write

    while core.scheduler.has_work:
        for one, _ in core.step():
            finish(core, one)
    eager = run_all(tiny_engine(device, graphs="disabled"), thirteen(max_tokens=4))
    assert [one.output[:4] for one in requests] == eager


def test_a_two_token_query_takes_the_relaxed_key_with_attention_outside_the_graphs(device) -> None:
    core = tiny_engine(device, graphs=WALK)
    (decision,) = [d for d in core.runner.coverage_mixed() if d.batch.num_tokens == 2]
    graph = core.runner.graph(BatchDescriptor.mixed(2, 1))
    assert decision.mode is Mode.BREAKABLE and decision.key == graph.key and graph.key.is_relaxed
    breaks = graph.recording.breaks
    assert [one.name for one in breaks] == ["attention"] * CONFIG.num_layers

    got = run_all(core, [request(0, [5, 6], 6)])
    assert [one.calls for one in breaks] == [1] * CONFIG.num_layers
    assert got == run_all(tiny_engine(device, graphs="disabled"), [request(0, [5, 6], 6)])
    routes = core.runner.stats.routes()
    (mixed,) = [route for route in routes if route["kind"] == "mixed"]
    assert (mixed["real"], mixed["padded"], mixed["mode"]) == (2, graph.key.num_tokens, "BREAKABLE")
    (uniform,) = [route for route in routes if route["kind"] == "uniform"]
    assert (uniform["real"], uniform["mode"], uniform["reason"], uniform["steps"]) == (1, "FULL", "exact", 5)
    assert core.runner.stats.steps == sum(core.runner.stats.by_mode().values()) == 6
