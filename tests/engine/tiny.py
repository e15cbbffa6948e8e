"""A decoder small enough to run thousands of steps, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import graph_config
from stepgraph.engine.kv_blocks import BLOCK_SIZE
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.params import SamplingParams
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import AttentionShape, get_backend
from stepgraph.runtime import GraphConfig, Ladder

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
)


def tiny_model(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, operations: str | None = None
) -> DecoderModel:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 * 2).to(device, dtype)

    c = CONFIG
    weights = {
        "model.embed_tokens.weight": random(c.vocab_size, c.hidden_size),
        "model.norm.weight": torch.ones(c.hidden_size, device=device, dtype=dtype),
        "lm_head.weight": random(c.vocab_size, c.hidden_size),
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(c.hidden_size, device=device, dtype=dtype)
        for name, rows, columns in (
            ("self_attn.q_proj", c.num_heads * c.head_dim, c.hidden_size),
            ("self_attn.k_proj", c.num_kv_heads * c.head_dim, c.hidden_size),
            ("self_attn.v_proj", c.num_kv_heads * c.head_dim, c.hidden_size),
            ("self_attn.o_proj", c.hidden_size, c.num_heads * c.head_dim),
            ("mlp.gate_proj", c.intermediate_size, c.hidden_size),
            ("mlp.up_proj", c.intermediate_size, c.hidden_size),
            ("mlp.down_proj", c.hidden_size, c.intermediate_size),
        ):
            weights[f"{prefix}{name}.weight"] = random(rows, columns)
    return DecoderModel(c, weights, c.max_position_embeddings, operations)


def tiny_graphs(
    graphs: str | GraphConfig,
    ladder: Ladder | None = None,
    *,
    device: torch.device | str = "cpu",
    max_num_seqs: int = 16,
    chunk_tokens: int = 64,
    compile: str = "off",
) -> GraphConfig:
    """The configuration that `tiny_engine` takes by the same arguments."""
    tokens = most_tokens(chunk_tokens, max_num_seqs)
    return graph_config(  # type: ignore[arg-type]
        graphs, ladder, max_num_seqs=max_num_seqs, step_tokens=tokens, device=device, compile=compile
    )


def tiny_engine(
    device: torch.device | str = "cpu",
    *,
    graphs: str | GraphConfig = "full",
    max_num_seqs: int = 16,
    ladder: Ladder | None = None,
    num_blocks: int = 400,
    chunk_tokens: int = 64,
    max_model_len: int = 256,
    operations: str | None = None,
    **options: Any,
) -> EngineCore:
    shape = AttentionShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK_SIZE)
    core = EngineCore(
        tiny_model(device, operations=operations),
        get_backend(None, device, shape),
        tiny_graphs(graphs, ladder, device=device, max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        chunk_tokens=chunk_tokens,
        **options,
    )
    core.capture()
    return core


def request(id: int, prompt: list[int], max_tokens: int = 8, seed: int = 0, **params: float) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})  # type: ignore[arg-type]
    return Request(id, prompt, sampling, seed, max_tokens)


def finish(core: EngineCore, request: Request) -> bool:
    """Take the request out once it has its tokens."""
    if len(request.output) >= request.max_tokens:
        core.scheduler.remove(request)
        return True
    return False


def run_all(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    """Every request to its end; each one's tokens."""
    for one in requests:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        for one, _ in core.step():
            finish(core, one)
    return [one.output for one in requests]


def blocks_held(requests: list[Request]) -> int:
    return sum(len(one.blocks) for one in requests)
