"""What the engine makes of the graphs it is asked for: names, ladders, and what the attention backend cannot do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine.tiny import CONFIG, request, run_all, tiny_engine, tiny_graphs, tiny_model

from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import graph_config
from stepgraph.engine.kv_blocks import BLOCK_SIZE
from stepgraph.ops.attention import AttentionShape
from stepgraph.ops.attention.contract import LiveTensors
from stepgraph.ops.attention.reference import ReferenceAttention
from stepgraph.runtime import Backend, ConfigError, DecodePhase, GraphConfig, Ladder, PrefillPhase, ReplayError
from stepgraph.runtime.support import AttentionCGSupport

SHAPE = AttentionShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE)
SIZES = {"max_num_seqs": 16, "max_model_len": 256, "num_blocks": 100, "chunk_tokens": 64}


def engine(graphs, support: AttentionCGSupport, max_query_len: int | None = None, **options) -> EngineCore:
    """An engine whose attention says that it has `support`, and a bound."""
    attention = ReferenceAttention(SHAPE, torch.device("cpu"))
    attention.support, attention.max_query_len = support, max_query_len
    return EngineCore(tiny_model(), attention, graphs, **SIZES, **options)


@pytest.mark.parametrize(
    ("name", "decode", "prefill"),
    [
        ("full", "full", "full"),
        ("FULL", "full", "full"),
        ("breakable", "breakable", "breakable"),
        ("PIECEWISE", "breakable", "breakable"),
        ("FULL_AND_PIECEWISE", "full", "breakable"),
        ("FULL_DECODE_ONLY", "full", "disabled"),
        ("disabled", "disabled", "disabled"),
        ("NONE", "disabled", "disabled"),
    ],
)
def test_names(name: str, decode: str, prefill: str) -> None:
    config = tiny_graphs(name)
    assert (config.decode.backend, config.prefill.backend) == (decode, prefill)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tokens", [1, 17, 64, 164, 512, 2000, 10**6])
def test_the_prefill_ladder_ends_at_the_largest_step_and_leaves_no_gap(device: str, tokens: int) -> None:
    config = graph_config("full", None, max_num_seqs=1, step_tokens=tokens, device=device)
    prefill = config.prefill
    assert prefill.ladder.max_size == min(tokens, 65536)
    for size in range(1, prefill.ladder.max_size + 1):
        rung = prefill.ladder.rung(size)
        assert rung <= max(prefill.pad_floor, prefill.pad_factor * size)


def test_a_configuration_has_ladders_of_its_own() -> None:
    config = GraphConfig(DecodePhase(Backend.FULL, Ladder.explicit([4, 96])))
    sizes = {"max_num_seqs": 100, "step_tokens": 512, "device": "cpu"}
    assert graph_config(config, None, **sizes) is config
    with pytest.raises(ConfigError, match="give only one of them"):
        graph_config(config, Ladder.vllm(128), **sizes)


def test_a_short_ladder_leaves_a_cliff_and_room_for_every_row(caplog) -> None:
    graphs = GraphConfig(DecodePhase(Backend.FULL, Ladder.explicit([4, 8])))
    with caplog.at_level(logging.WARNING):
        core = tiny_engine(graphs=graphs, max_num_seqs=13)
    assert core.buffers.max_requests == 13 and "9" in caplog.text and "8" in caplog.text


def test_what_attention_cannot_do_is_changed_with_a_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        core = engine(tiny_graphs("full"), AttentionCGSupport.UNIFORM_BATCH)
    (change,) = core.resolution.changes
    assert core.resolution.config.prefill.backend is Backend.BREAKABLE
    assert core.resolution.config.decode.backend is Backend.FULL
    assert "reference" in change.reason and "BREAKABLE" in change.reason and change.reason in caplog.text
    core.capture()
    got = run_all(core, [request(0, [5, 6, 7], 6)])
    assert got == run_all(tiny_engine(graphs="disabled"), [request(0, [5, 6, 7], 6)])
    assert core.runner.stats.by_mode() == {"BREAKABLE": 1, "FULL": 5}


def test_attention_with_a_bound_of_new_tokens_is_given_no_longer_prompts() -> None:
    bounded, asked = engine(tiny_graphs("full"), AttentionCGSupport.ALWAYS, 8), tiny_graphs("full")
    (change,) = bounded.resolution.changes
    assert change.rule == "full-prefill-query-bound" and "reference replays at most 8 tokens" in change.reason
    assert bounded.resolution.config.prefill.backend is Backend.BREAKABLE
    assert engine(asked, AttentionCGSupport.ALWAYS, bounded.buffers.max_tokens).resolution.config == asked


def test_strict_refuses_a_downgrade_and_names_the_backend() -> None:
    with pytest.raises(ConfigError, match="reference.*BREAKABLE"):
        engine(tiny_graphs("full"), AttentionCGSupport.UNIFORM_BATCH, strict=True)
    engine(tiny_graphs("FULL_AND_PIECEWISE"), AttentionCGSupport.UNIFORM_BATCH, strict=True)


def test_full_graphs_over_attention_that_cannot_be_captured_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reference \(NEVER\)"):
        engine(tiny_graphs("full"), AttentionCGSupport.NEVER)
    core = engine(tiny_graphs("breakable"), AttentionCGSupport.NEVER)
    core.capture()
    got = run_all(core, [request(0, [5, 6, 7], 6)])
    assert got == run_all(tiny_engine(graphs="disabled"), [request(0, [5, 6, 7], 6)])


class WithWorkspace(ReferenceAttention):
    """A backend whose kernels would use memory of its own."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.workspace = SimpleNamespace(parts=torch.zeros(4), arrived=torch.zeros(2))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return LiveTensors(self, "workspace.parts", "workspace.arrived")


def replace_workspace(attention: WithWorkspace) -> None:
    attention.workspace = SimpleNamespace(parts=torch.zeros(8), arrived=attention.workspace.arrived)


def replace_its_tensor(attention: WithWorkspace) -> None:
    attention.workspace.parts = torch.zeros(4)


def move_its_tensor(attention: WithWorkspace) -> None:
    attention.workspace.parts.data = torch.zeros(4)


@pytest.mark.parametrize("move", [replace_workspace, replace_its_tensor, move_its_tensor])
def test_attention_whose_workspace_moved_is_refused_by_name(move: Callable[[WithWorkspace], None]) -> None:
    attention = WithWorkspace(SHAPE, torch.device("cpu"))
    core = EngineCore(tiny_model(), attention, tiny_graphs("full"), **SIZES)
    core.capture()
    run_all(core, [request(0, [5, 6, 7], 6)])
    move(attention)
    with pytest.raises(ReplayError, match=r"attention\.workspace\.parts from cpu 0x\w+ to cpu 0x") as refused:
        run_all(core, [request(1, [5, 6, 7], 30)])  # each step looks at a few tensors
    assert "arrived" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"decode": DecodePhase(Backend.FULL, Ladder.explicit([16]), query_lens=(1, 4))},
        {"lora_cases": (0, 2)},
    ],
)
def test_what_the_engine_does_not_do_is_refused(change) -> None:
    with pytest.raises(ConfigError, match="one token a step without adapters"):
        engine(replace(GraphConfig(prefill=PrefillPhase()), **change), AttentionCGSupport.ALWAYS)
