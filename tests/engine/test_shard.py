"""What a rank has of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.tiny import CONFIG
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.parallel import Shard
from stepgraph.engine.random_model import SHAPES
from stepgraph.engine.tensors import expected_tensors
from stepgraph.runtime.errors import ConfigError


@st.composite
def sharded(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    config = replace(
        CONFIG,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=draw(st.integers(8, 700)),
        vocab_size=draw(st.integers(8, 700)),
    )
    heads = kv_heads * group
    worlds = [w for w in range(1, 9) if w <= kv_heads or (w % kv_heads == 0 and heads % w == 0)]
    return config, draw(st.sampled_from(worlds))


@given(sharded())
def test_every_part_is_somebodys(case: tuple[ModelConfig, int]) -> None:
    config, world = case
    shards = [Shard(config, rank, world) for rank in range(world)]
    for part, total in (("heads", config.num_heads), ("inner", config.intermediate_size), ("vocab", config.vocab_size)):
        dealt = [one for shard in shards for one in getattr(shard, part)]
        assert dealt == list(range(total))
        assert all(len(getattr(shard, part)) > 0 for shard in shards)
    group = config.num_heads // config.num_kv_heads
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert shard.local.num_heads % shard.local.num_kv_heads == 0  # what attention takes for granted


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_an_8b_model_is_dealt_out_evenly(world: int) -> None:
    config = SHAPES["llama-3-8b"]
    for rank in range(world):
        local = Shard(config, rank, world).local
        assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (
            32 // world,
            8 // world,
            14336 // world,
        )
        assert len(Shard(config, rank, world).vocab) == 128256 // world
        assert Shard(config, rank, world).alone == replace(local, vocab_size=128256 // world)


def test_three_kv_heads_on_two_ranks() -> None:
    """SmolLM2-135M."""
    config = replace(CONFIG, num_heads=9, num_kv_heads=3)
    first, second = Shard(config, 0, 2), Shard(config, 1, 2)
    assert (first.heads, second.heads) == (range(0, 3), range(3, 9))
    assert (first.kv_heads, second.kv_heads) == (range(0, 1), range(1, 3))


@pytest.mark.parametrize(("kv_heads", "world"), [(2, 3), (3, 4), (4, 8)])
def test_heads_that_cannot_be_dealt_out(kv_heads: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"{world} ranks for .* and {kv_heads} KV heads: use at most {kv_heads}"):
        Shard(replace(CONFIG, num_heads=kv_heads, num_kv_heads=kv_heads), 0, world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_cut_tensors_have_the_shapes_of_the_local_configuration(world: int) -> None:
    config = replace(CONFIG, num_heads=8, num_kv_heads=2, qkv_bias=True, qk_norm=True)
    whole = {name: torch.randn(shape) for name, shape in expected_tensors(config).items()}
    for rank in range(world):
        shard = Shard(config, rank, world)
        for name, shape in expected_tensors(shard.local).items():
            if name == "lm_head.weight":
                shape = (len(shard.vocab), config.hidden_size)
            part = shard.cut(name, whole[name])
            assert part.shape == shape, name
            assert part.is_contiguous()


def test_parts_of_a_projection_sum_to_the_whole() -> None:
    config = replace(CONFIG, intermediate_size=45)  # unequal parts
    name = "model.layers.0.mlp.{}_proj.weight"
    up, down = torch.randn(45, 32), torch.randn(32, 45)
    x = torch.randn(3, 32)
    parts = []
    for rank in range(2):
        shard = Shard(config, rank, 2)
        parts.append((x @ shard.cut(name.format("up"), up).T) @ shard.cut(name.format("down"), down).T)
    torch.testing.assert_close(parts[0] + parts[1], (x @ up.T) @ down.T, rtol=1e-4, atol=1e-4)
