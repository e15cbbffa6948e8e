"""The decoder: weights laid out for the five operations, and the forward pass over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.engine.config import ModelConfig
from stepgraph.ops.layer import StepGeometry, linear_add, norm_gate_up_swiglu, norm_qkv_rope_write, rotary_tables
from stepgraph.ops.linear import linear

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(q [rows, heads, head_dim], one layer of the cache, out like q): writes the attention output into `out`."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices, projections that read the same input joined into one."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class DecoderModel:
    """A Llama-shaped decoder. Knows nothing of requests: rows in, hidden states out, the cache written.

    weights: Hugging Face names.
    max_positions: rotary tables cover positions below it.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], max_positions: int) -> None:
        self.config = config
        self.embedding = weights["model.embed_tokens.weight"]
        self.final_norm = weights["model.norm.weight"]
        self.lm_head = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self.layers = [_layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._cos, self._sin = rotary_tables(config.head_dim, config.rope_theta, max_positions, self.dtype, self.device)

    def geometry(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> StepGeometry:
        """positions: int64 [rows]. block_tables: [rows, max_blocks], one row per token here."""
        blocks = block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
        return StepGeometry(
            self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1), blocks, positions % block_size
        )

    def forward(
        self, tokens: torch.Tensor, geometry: StepGeometry, kv_cache: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """tokens: int64 [rows]. kv_cache: [blocks, layers, 2, block_size, kv_heads, head_dim].

        Returns hidden states [rows, hidden] before the final norm.
        """
        config = self.config
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            kv = kv_cache[:, index]
            q = norm_qkv_rope_write(
                hidden, layer.input_norm, config.rms_norm_eps, layer.qkv, geometry, kv, config.num_heads
            )
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attend(q, kv, attended)
            hidden = linear_add(attended.view(q.shape[0], -1), layer.attention_out, hidden)
            activated = norm_gate_up_swiglu(hidden, layer.post_norm, config.rms_norm_eps, layer.gate_up)
            hidden = linear_add(activated, layer.down, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden], from `forward`. Returns [rows, vocab] in the model's dtype."""
        normed = F.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.lm_head)


def _layer(weights: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    def take(*names: str) -> torch.Tensor:
        parts = [weights[f"{prefix}{name}.weight"] for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return LayerWeights(
        input_norm=take("input_layernorm"),
        qkv=take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out=take("self_attn.o_proj"),
        post_norm=take("post_attention_layernorm"),
        gate_up=take("mlp.gate_proj", "mlp.up_proj"),
        down=take("mlp.down_proj"),
    )
