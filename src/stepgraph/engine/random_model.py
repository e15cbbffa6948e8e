"""Models of a well-known shape with random weights, made on the device: for measuring without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.parallel import TensorParallel
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
    "llama-3-70b": replace(
        _LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
    ),
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
    parallel: TensorParallel | None = None,
) -> DecoderModel:
    """A model whose activations stay finite and whose logits are of ordinary size; the same for the same seed.

    shape: one of SHAPES, or a configuration. max_positions, operations: as for DecoderModel. parallel: of a rank, whose
    part alone is made; parts of the same shape are the same on all ranks.

    Raises:
        ConfigError: an unknown shape, or an operation set that does not run on the device.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"shape: {shape!r} is not one of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    shard = None if parallel is None else parallel.shard(shape)
    sizes = expected_tensors(shape if shard is None else shard.local)
    if shard is not None and "lm_head.weight" in sizes:
        sizes["lm_head.weight"] = (len(shard.vocab), shape.hidden_size)
    for name, size in sizes.items():
        if len(size) == 1:
            weights[name] = torch.ones(size, device=device, dtype=dtype)
        else:
            # Each projection keeps the size of what it is given.
            weights[name] = torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(size[-1] ** -0.5)
    if parallel is None or shard is None:
        return DecoderModel(shape, weights, max_positions, operations)
    reduce, vocab = parallel.all_reduce, shard.vocab
    return DecoderModel(shard.local, weights, max_positions, operations, reduce=reduce, vocab=vocab)
