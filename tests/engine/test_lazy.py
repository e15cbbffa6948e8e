"""Lazy graphs in the engine: it serves at once, and a gap between two steps changes no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.tiny import finish, request, tiny_engine, tiny_graphs

from stepgraph import LLM, SamplingParams
from stepgraph.engine.graphs import graph_config
from stepgraph.runtime import Backend, ConfigError, DecodePhase, GraphConfig, Ladder, Mode, ReplayError


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
    assert len(llm.capture_report.graphs) == 1
    before = llm.generate("One, two,", params)[0].outputs[0].token_ids
    assert llm.stats.by_reason()["pending"] > 0
    assert len(llm.capture_report.graphs) == 2 and not llm.capture_report.pending  # nothing was left to do: a gap
    assert llm.capture_pending().graphs == {}
    assert llm.generate("One, two,", params)[0].outputs[0].token_ids == before
    assert llm.stats.by_reason()["exact"] > 0


def test_a_step_without_work_is_a_gap(device: torch.device) -> None:
    graphs = tiny_graphs("FULL_DECODE_ONLY", Ladder.explicit([1, 2, 16]), device=device)
    core = tiny_engine(device, graphs=replace(graphs, lazy=True))
    assert not core.step() and [key.num_reqs for key in core.runner.pending] == [1]
    assert not core.step() and not core.step() and not core.runner.pending


def test_a_gap_that_fails_costs_no_answer(demo_model, caplog) -> None:
    llm = LLM(demo_model, device="cpu", ladder=Ladder.explicit([1, 2]), max_num_seqs=2, max_model_len=64, lazy=True)

    def refuse(*_: object) -> None:
        raise ReplayError("a weight has moved")

    llm.core.runner.capture_pending = refuse  # type: ignore[method-assign]
    assert llm.generate("One, two,", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids
    assert "none could be recorded: a weight has moved" in caplog.text


def test_lazy_beside_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="says so itself"):
        graph_config(GraphConfig(), None, max_num_seqs=1, step_tokens=8, device="cpu", lazy=True)


@pytest.mark.gpu
def test_what_is_left_compiles_no_further_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest sizes have compiled every variant that the others use."""
    triton = pytest.importorskip("triton")
    if not hasattr(triton, "knobs"):
        pytest.skip("this Triton does not tell what it compiles")
    compiled: list[str] = []

    def note(*, fn: object, **_: object) -> None:
        compiled.append(str(fn))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    graphs = tiny_graphs("full", Ladder.explicit([1, 2, 3, 4, 8, 16]), device="cuda")
    core = tiny_engine("cuda", graphs=replace(graphs, lazy=True))
    compiled.clear()
    core.capture_pending()
    assert not core.runner.pending and not compiled
