"""Models with random weights of a known shape."""

from dataclasses import replace

import pytest
import torch

from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.engine.tensors import expected_tensors
from stepgraph.ops.attention import AttentionShape, get_backend
from stepgraph.runtime import ConfigError

PARAMETERS = {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    assert sum(torch.Size(size).numel() for size in expected_tensors(SHAPES[name]).values()) == PARAMETERS[name]


def test_activations_stay_finite_and_a_seed_repeats_the_model() -> None:
    config = replace(
        SHAPES["llama-3.2-1b"], hidden_size=128, intermediate_size=96, head_dim=16, num_heads=8, vocab_size=300
    )
    first, again, other = (
        random_model(config, device="cpu", dtype=torch.float32, max_positions=64, seed=seed) for seed in (3, 3, 4)
    )
    attention = get_backend("reference", "cpu", AttentionShape(8, 8, 16))
    cache = torch.randn(3, config.num_layers, 2, 16, 8, 16)
    tables, lengths = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)

    def logits(model) -> torch.Tensor:
        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            attention.decode(q, kv, tables, lengths, out)

        with torch.no_grad():
            hidden = model.forward(torch.tensor([7]), torch.tensor([19]), tables, cache.clone(), attend)
            return model.logits(hidden)

    assert torch.equal(logits(first), logits(again)) and not torch.equal(logits(first), logits(other))
    assert 0.1 < logits(first).std() < 10


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="shape: 'gpt' is not one of llama-3-8b"):
        random_model("gpt", device="cpu", dtype=torch.float32, max_positions=8)
