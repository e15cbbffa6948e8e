"""Steps in compiled pieces: what they give, where they are cut, what is shared, what is refused and counted."""

import logging

import pytest
import torch
from runtime.sums import SLOTS, sums_runner

from stepgraph.runtime import (
    CaptureError,
    ConfigError,
    GraphConfig,
    GraphRunner,
    Ladder,
    StaticBuffers,
    graph_break,
)
from stepgraph.runtime.compiler.build import PieceCompiler, no_graphs_of_its_own
from stepgraph.runtime.compiler.pieces import TracedBreak
from stepgraph.runtime.compiler.program import Program
from stepgraph.runtime.compiler.steps import MOST_AT_RUN_TIME
from stepgraph.runtime.compiler.trace import trace

LADDERS = {"ladder": Ladder.explicit([1, 2, 4]), "prefill_ladder": Ladder.explicit([8, 16])}


def compiled(step, backend: str = "aot_eager") -> tuple[Program, PieceCompiler]:
    compiler = PieceCompiler(backend)
    with torch.no_grad():
        traced, _ = trace(step)
        return Program(traced, compiler), compiler


@graph_break
def double_into(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source * 2)


def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        out = torch.empty_like(x)
        double_into(x, out)
        x = torch.tanh(out @ weight.t())
    return x


def test_layers_that_do_the_same_share_a_compilation() -> None:
    weights = [torch.randn(4, 4) for _ in range(5)]
    x = torch.randn(3, 4)
    program, compiler = compiled(lambda: layers(x + 1, weights))
    assert torch.equal(program(), layers(x + 1, weights))
    assert (compiler.pieces, compiler.compiled) == (6, 3)  # the first makes x, the last needs no room for more
    x.normal_()
    assert torch.equal(program(), layers(x + 1, weights))


def test_a_step_is_cut_at_its_breaks_and_they_see_real_values() -> None:
    seen: list[float] = []

    @graph_break
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x.sum()))
        return x * 3

    x = torch.ones(2)
    program, _ = compiled(lambda: look(x + 1) - 1)
    assert seen == [4.0]
    x.fill_(2)
    assert program().tolist() == [8, 8] and seen == [4.0, 6.0]


def test_parts_alternate() -> None:
    x = torch.ones(2, 4)
    with torch.no_grad():
        parts = trace(lambda: layers(x, [torch.eye(4)] * 2))[0].parts
    assert [isinstance(part, TracedBreak) for part in parts] == [False, True, False, True, False]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_writes_through_views_that_overlap(backend: str) -> None:
    slab = torch.zeros(16)
    whole, half, other = slab[:8], slab[:4], slab[8:]

    def step() -> torch.Tensor:
        whole.add_(1)
        half.mul_(2)
        other.copy_(whole)
        return whole.sum() + whole[2:6]

    program, _ = compiled(step, backend)
    slab.zero_()
    got = [program().clone(), program().clone(), slab.clone()]
    slab.zero_()
    want = [step().clone(), step().clone(), slab.clone()]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_results_that_share_memory_go_on_sharing_it() -> None:
    x = torch.arange(6.0)

    @graph_break
    def write(part: torch.Tensor) -> None:
        part.fill_(-1)

    def step() -> torch.Tensor:
        whole = x * 2
        write(whole[:3])
        return whole + 1

    program, _ = compiled(step)
    assert program().tolist() == step().tolist() == [0, 0, 0, 7, 9, 11]


def test_a_view_between_two_breaks_is_used_behind_them() -> None:
    @graph_break
    def nothing(x: torch.Tensor) -> None:
        pass

    x = torch.arange(6.0)

    def step() -> torch.Tensor:
        made = x * 2
        nothing(made)
        view = made.view(2, 3)  # all that this piece does
        nothing(made)
        return view + 1

    program, _ = compiled(step)
    x.mul_(5)
    assert torch.equal(program(), step())


def test_what_a_break_hides_is_refused() -> None:
    kept = []

    @graph_break
    def hide(x: torch.Tensor) -> None:
        kept.append(x * 2)

    def step() -> torch.Tensor:
        hide(torch.ones(2))
        return kept[-1] + 1

    with pytest.raises(CaptureError, match="without returning it"):
        trace(step)


def test_host_reads_are_refused_by_their_line() -> None:
    with pytest.raises(CaptureError, match=r"test_compiler.py.*item"):
        trace(lambda: torch.ones(2) * torch.ones(1).item())


def test_the_compiler_makes_no_graphs_of_its_own() -> None:
    from torch._inductor import config

    with config.patch({"triton.cudagraphs": True}), no_graphs_of_its_own():
        policy = getattr(config, "cudagraph_policy", None)
        assert (not config.triton.cudagraphs) if policy is None else (not policy.should_wrap(None))


@pytest.mark.parametrize(
    ("mode", "modes"),
    [("PIECEWISE", {"PIECEWISE"}), ("FULL_AND_PIECEWISE", {"FULL", "PIECEWISE"}), ("FULL", {"FULL"})],
)
def test_a_runner_gives_what_it_gives_uncompiled(mode: str, modes: set[str]) -> None:
    plain = sums_runner(GraphConfig.preset("NONE"))
    runner = sums_runner(GraphConfig.preset(mode, **LADDERS, compile="aot_eager"))
    total = runner.compile_total()
    assert total.steps == len(runner.capture_report.graphs) == 5 and total.seconds > 0
    costs = [graph.cost for graph in runner.capture_report.graphs.values()]
    assert sum(cost.compile_seconds for cost in costs) == pytest.approx(total.seconds)
    assert all(cost.warmup_seconds > 0 and cost.compile_seconds > 0 for cost in costs)
    for one in (plain, runner):
        one.buffers.reset()
    for call in (
        {"num_requests": 2, "num_tokens": 5, "ids": list(range(5)), "query_lens": [2, 3]},
        {"num_requests": 2, "ids": [7, 9]},
        {"num_requests": 3, "num_tokens": 12, "ids": list(range(12)), "query_lens": [4, 4, 4]},
    ):
        want, got = plain(**call), runner(**call)
        assert all(torch.equal(want.tensors[name], got.tensors[name]) for name in want.tensors)
    assert set(runner.stats.by_mode()) == modes and runner.stats.compiles == 0
    assert runner.verify().ok
    node = runner.graph_nodes(2)[0]
    assert (node.name, node.region) == ("piece.0", "piece.0")


def test_compiling_while_serving_is_counted_said_and_bounded(caplog) -> None:
    runner = sums_runner(GraphConfig(compile="aot_eager"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for tokens in range(1, MOST_AT_RUN_TIME + 4):
                runner(num_requests=1, num_tokens=tokens, ids=[1] * tokens, query_lens=[tokens])
    stats = runner.stats
    assert stats.compiles == MOST_AT_RUN_TIME and stats.compile_seconds > 0
    assert stats.as_dict()["compiles"] == MOST_AT_RUN_TIME
    assert f"stepgraph_compiles_total {MOST_AT_RUN_TIME}" in stats.to_prometheus().splitlines()
    said = [record.message for record in caplog.records]
    assert sum("compiled while serving:" in line for line in said) == MOST_AT_RUN_TIME
    assert sum("further ones run uncompiled" in line for line in said) == 1


def test_a_size_that_does_not_compile_is_dropped_with_its_reason(monkeypatch) -> None:
    def refuse(name: str):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr("torch._dynamo.lookup_backend", refuse)
    with pytest.raises(CaptureError, match="aot_eager does not compile a piece: RuntimeError: no such kernel"):
        sums_runner(GraphConfig.preset("PIECEWISE", **LADDERS, compile="aot_eager"))


def test_a_new_capture_compiles_nothing_again() -> None:
    runner = sums_runner(GraphConfig.preset("PIECEWISE", **LADDERS, compile="aot_eager"))
    before = runner.compile_total()
    runner.recapture()
    after = runner.compile_total()
    assert after.distinct == before.distinct and after.pieces == 2 * before.pieces


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown compiler 'gcc'; known are off, inductor, aot_eager"):
        GraphConfig(compile="gcc")
    buffers = StaticBuffers(max_requests=8, max_tokens=32, slots=SLOTS)
    assert GraphRunner(lambda **views: views["total"], buffers, GraphConfig()).compile_total() is None
