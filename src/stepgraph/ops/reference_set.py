"""The torch reference as an operation set, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stepgraph.ops.layer import StepGeometry, linear_add, norm_gate_up_swiglu, norm_qkv_rope_write
from stepgraph.ops.linear import linear
from stepgraph.ops.lora import NO_ADAPTERS, LayerAdapters, LayerLora, LoraRows, ReferenceLora, bind_layers
from stepgraph.ops.operations import Attend, DecoderShape, Hidden, LayerWeights
from stepgraph.runtime.regions import region


class ReferenceOperations:
    """`ops/layer.py`, five operations a layer with attention. Its rows carry no residual of their own."""

    name = "reference"

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape

    def places(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> StepGeometry:
        with region("places"):
            blocks = block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
            cos, sin = self._shape.cos[positions].unsqueeze(1), self._shape.sin[positions].unsqueeze(1)
            return StepGeometry(cos, sin, blocks, positions % block_size)

    def embed(self, tokens: torch.Tensor, embedding: torch.Tensor) -> Hidden:
        with region("embedding"):
            return Hidden(F.embedding(tokens, embedding))

    def adapters(self, rows: LoraRows, layers: Sequence[LayerLora]) -> list[LayerAdapters]:
        with region("adapters"):
            apply = ReferenceLora(rows)
        return bind_layers(apply, layers)

    def layer(
        self,
        hidden: Hidden,
        weights: LayerWeights,
        places: StepGeometry,
        kv: torch.Tensor,
        attend: Attend,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> Hidden:
        x, eps = hidden.new, self._shape.norm_eps
        with region("norm_qkv_rope_write"):
            q = norm_qkv_rope_write(
                x,
                weights.input_norm,
                eps,
                weights.qkv,
                places,
                kv,
                self._shape.num_heads,
                qkv_bias=weights.qkv_bias,
                q_norm=weights.q_norm,
                k_norm=weights.k_norm,
                adapt=adapters.qkv,
            )
        with region("attention"):
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attend(q, kv, attended)
        with region("output_projection"):
            attended = attended.view(q.shape[0], -1)
            x = linear_add(attended, weights.attention_out, x, adapters.attention_out, self._shape.reduce)
        with region("norm_gate_up_swiglu"):
            activated = norm_gate_up_swiglu(x, weights.post_norm, eps, weights.gate_up, adapters.gate_up)
        with region("down_projection"):
            return Hidden(linear_add(activated, weights.down, x, adapters.down, self._shape.reduce))

    def head(self, hidden: Hidden, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with region("final_norm"):
            normed = F.rms_norm(hidden.new, norm.shape, norm, self._shape.norm_eps)
        with region("lm_head"):
            return linear(normed, weight)

    def describe(self, weights: LayerWeights, lm_head: torch.Tensor, rows: int) -> dict[str, str]:
        return {}
