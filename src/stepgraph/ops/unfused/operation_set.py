"""A decoder layer as ten launches, nothing fused beyond what every engine fuses. What graphs are measured with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stepgraph.ops.lora import NO_ADAPTERS, LayerAdapters, LayerLora, LoraRows, bind_layers
from stepgraph.ops.lora.triton_lora import TritonLora
from stepgraph.ops.operations import Attend, DecoderShape, Hidden, LayerWeights, Places
from stepgraph.ops.unfused.kernels import add_rms_norm, rotate, silu_mul, write_kv
from stepgraph.runtime.regions import region

TEN = (
    "input_norm",
    "qkv_projection",
    "rotary",
    "kv_write",
    "attention",
    "output_projection",
    "post_norm",
    "gate_up_projection",
    "activation",
    "down_projection",
)
"""The regions of a layer, in order: one launch each, where neither cuBLAS nor the attention backend adds any."""


class UnfusedOperations:
    """Projections by cuBLAS, the rest by small Triton kernels. float32, bfloat16 and float16, on CUDA."""

    name = "unfused"

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape

    def places(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> Places:
        return Places(positions, block_tables)

    def embed(self, tokens: torch.Tensor, embedding: torch.Tensor) -> Hidden:
        with region("embedding"):
            return Hidden(F.embedding(tokens, embedding))

    def adapters(self, rows: LoraRows, layers: Sequence[LayerLora]) -> list[LayerAdapters]:
        return bind_layers(TritonLora(rows), layers)

    def layer(
        self,
        hidden: Hidden,
        weights: LayerWeights,
        places: Places,
        kv: torch.Tensor,
        attend: Attend,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> Hidden:
        shape = self._shape
        with region("input_norm"):
            normed, residual = self._add_norm(hidden, weights.input_norm)
        with region("qkv_projection"):
            qkv = F.linear(normed, weights.qkv, weights.qkv_bias)
            if adapters.qkv is not None:
                adapters.qkv(normed, qkv)
        with region("rotary"):
            rotate(
                qkv, places.positions, shape.cos, shape.sin, shape.num_heads, shape.num_kv_heads,
                weights.q_norm, weights.k_norm, shape.norm_eps,
            )  # fmt: skip
        with region("kv_write"):
            write_kv(qkv, places.positions, places.block_tables, kv, shape.num_heads)
        with region("attention"):
            q = qkv[:, : shape.num_heads * shape.head_dim].view(-1, shape.num_heads, shape.head_dim)
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attend(q, kv, attended)
        with region("output_projection"):
            new = F.linear(attended.flatten(1), weights.attention_out)
            if adapters.attention_out is not None:
                adapters.attention_out(attended.flatten(1), new)
        new = self._summed(new)
        with region("post_norm"):
            normed, residual = self._add_norm(Hidden(new, residual), weights.post_norm)
        with region("gate_up_projection"):
            gate_up = F.linear(normed, weights.gate_up)
            if adapters.gate_up is not None:
                adapters.gate_up(normed, gate_up)
        with region("activation"):
            activated = silu_mul(gate_up)
        with region("down_projection"):
            new = F.linear(activated, weights.down)
            if adapters.down is not None:
                adapters.down(activated, new)
        return Hidden(self._summed(new), residual)

    def head(self, hidden: Hidden, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with region("final_norm"):
            normed, _ = self._add_norm(hidden, norm)
        with region("lm_head"):
            return F.linear(normed, weight)

    def describe(self, weights: LayerWeights, lm_head: torch.Tensor, rows: int) -> dict[str, str]:
        return {}

    def _summed(self, new: torch.Tensor) -> torch.Tensor:
        """Over the ranks that have a part of the projection each."""
        if self._shape.reduce is None:
            return new
        with region("all_reduce"):
            return self._shape.reduce(new, None)

    def _add_norm(self, hidden: Hidden, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum itself: in place of the residual, or the rows as they are where there is none."""
        normed = add_rms_norm(hidden.new, hidden.residual, weight, self._shape.norm_eps)
        return normed, hidden.new if hidden.residual is None else hidden.residual
