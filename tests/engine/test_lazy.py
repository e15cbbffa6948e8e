"""Lazy graphs in the engine: it serves at once, and a gap between two steps changes no token."""

from __future__ import annotations

from dataclasses import replace

import torch
from engine.tiny import finish, request, tiny_engine, tiny_graphs

from stepgraph import LLM, SamplingParams
from stepgraph.runtime import Backend, DecodePhase, GraphConfig, Ladder, Mode


def tokens(core, gaps: bool) -> list[list[int]]:
    requests = [request(i, [3 + i, 5, 7 * i % 90], max_tokens=6 + i, seed=i, temperature=0.7) for i in range(5)]
    for one in requests:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        for one, _ in core.step():
            finish(core, one)
        if gaps:
            core.capture_pending(seconds=0)
    return [one.output for one in requests]


def test_gaps_change_no_token(device: torch.device) -> None:
    graphs = tiny_graphs("full", Ladder.explicit([1, 2, 4, 8, 16]), device=device)
    lazy = tiny_engine(device, graphs=replace(graphs, lazy=True))
    captured = set(lazy.runner.capture_report.graphs)
    assert len(captured) == 2 and lazy.runner.pending
    assert tokens(lazy, gaps=True) == tokens(tiny_engine(device, graphs=graphs), gaps=False)
    assert lazy.runner.stats.by_mode()[Mode.FULL] > 0 and len(lazy.runner.capture_report.graphs) > len(captured)
    lazy.capture_pending()
    assert not lazy.runner.pending


def test_an_llm_serves_before_its_graphs_are_there(demo_model) -> None:
    config = GraphConfig(decode=DecodePhase(Backend.FULL, Ladder.explicit([1, 2])), lazy=True)
    llm = LLM(demo_model, device="cpu", graphs=config, max_num_seqs=2, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4)
    before = llm.generate("One, two,", params)[0].outputs[0].token_ids
    assert llm.stats.by_reason()["pending"] > 0 and len(llm.capture_report.graphs) == 1
    assert [key.num_reqs for key in llm.capture_pending().graphs] == [1] and len(llm.capture_report.graphs) == 2
    assert llm.generate("One, two,", params)[0].outputs[0].token_ids == before
    assert llm.stats.by_reason()["exact"] > 0
