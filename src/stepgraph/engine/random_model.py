"""Models of a well-known shape with random weights, made on the device: for measuring without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.tensors import expected_tensors
from stepgraph.runtime.errors import ConfigError

_LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=128000,
    eos_token_ids=(128001,),
)

SHAPES = {
    "llama-3-8b": _LLAMA_3_8B,
    # Without the scaling of its rotary frequencies, which costs nothing.
    "llama-3.2-1b": replace(
        _LLAMA_3_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
}
"""Configurations by name."""


def random_model(
    shape: str | ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    max_positions: int,
    operations: str | None = None,
    seed: int = 0,
) -> DecoderModel:
    """A model whose activations stay finite and whose logits are of ordinary size; the same for the same seed.

    shape: one of SHAPES, or a configuration. max_positions, operations: as for DecoderModel.

    Raises:
        ConfigError: an unknown shape, or an operation set that does not run on the device.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"shape: {shape!r} is not one of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, size in expected_tensors(shape).items():
        if len(size) == 1:
            weights[name] = torch.ones(size, device=device, dtype=dtype)
        else:
            # Each projection keeps the size of what it is given.
            weights[name] = torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(size[-1] ** -0.5)
    return DecoderModel(shape, weights, max_positions, operations)
