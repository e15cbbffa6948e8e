"""The engine with its step compiled: the tokens of eager, by every way to run the pieces."""

import pytest
from engine.tiny import request, run_all, tiny_engine, tiny_graphs

from stepgraph.engine.graphs import graph_config
from stepgraph.ops.operations import choose_operations
from stepgraph.runtime import ConfigError, GraphConfig, Ladder

SIZES = {"max_num_seqs": 4, "chunk_tokens": 32}


def requests() -> list:
    """Prompts of 1 to 60 tokens, longer than a step holds; greedy and sampled."""
    ways = [{}, {"temperature": 0.9, "top_k": 20}, {"temperature": 1.1, "repetition_penalty": 1.3}]
    lengths = [1, 5, 33, 60, 2, 17]
    return [request(i, [(7 * i + j) % 97 for j in range(n)], 7, seed=i, **ways[i % 3]) for i, n in enumerate(lengths)]


def engine(device, graphs: str, backend: str):
    asked = tiny_graphs(graphs, Ladder.explicit([1, 2, 4]), device=device, **SIZES, compile=backend)
    return tiny_engine(device, graphs=asked, operations="reference", **SIZES)


@pytest.mark.parametrize(
    ("graphs", "modes"),
    [
        ("breakable", {"PIECEWISE"}),
        ("FULL_AND_PIECEWISE", {"FULL", "PIECEWISE"}),
        ("full", {"FULL"}),
        ("FULL_DECODE_ONLY", {"FULL", "EAGER"}),
        ("disabled", {"EAGER"}),
    ],
)
def test_the_tokens_of_eager(device, graphs: str, modes: set[str]) -> None:
    want = run_all(tiny_engine(device, graphs="disabled", operations="reference", **SIZES), requests())
    core = engine(device, graphs, "aot_eager")
    assert not core.runner.capture_report.dropped
    assert run_all(core, requests()) == want
    assert set(core.runner.stats.by_mode()) == modes
    assert (core.runner.stats.compiles > 0) == ("EAGER" in modes)
    if modes != {"EAGER"}:
        assert core.verify().ok


def test_a_piece_is_one_record_of_the_tape_and_attention_the_break() -> None:
    core = engine("cpu", "breakable", "aot_eager")
    recording = core.runner.graph(2).recording
    assert [node.name for node in recording.nodes()] == ["piece.0", "piece.1", "piece.2"]
    assert [one.name for one in recording.breaks] == ["attention", "attention"]


@pytest.mark.slow
def test_inductor_gives_the_tokens_of_eager() -> None:
    core = engine("cpu", "breakable", "inductor")
    assert run_all(core, requests()) == run_all(tiny_engine(graphs="disabled", **SIZES), requests())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["breakable", "full", "FULL_AND_PIECEWISE"])
def test_inductor_on_a_gpu_is_near_eager(graphs: str) -> None:
    core = engine("cuda", graphs, "inductor")
    assert not core.runner.capture_report.dropped
    assert core.verify(rtol=1e-3, atol=1e-3).ok


def test_kernels_that_the_compiler_does_not_see_are_refused() -> None:
    assert choose_operations(None, "cuda", compiled=True) == "reference"
    for name in ("unfused", "fused"):
        with pytest.raises(ConfigError, match=f"does not see the kernels of '{name}'"):
            choose_operations(name, "cuda", compiled=True)


def test_a_configuration_has_a_compiler_of_its_own() -> None:
    with pytest.raises(ConfigError, match="give only one of them"):
        graph_config(GraphConfig(), None, max_num_seqs=1, step_tokens=8, device="cpu", compile="aot_eager")
