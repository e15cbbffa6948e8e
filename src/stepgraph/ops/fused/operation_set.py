"""A decoder layer as five launches for small batches; a projection for which a library is faster is the library's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from stepgraph.ops.fused import cuda_projection, launches
from stepgraph.ops.fused.small import embed, rms_norm, rope_write, silu_mul
from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Choice, Tile, Tiles, by_triton, load_tiles
from stepgraph.ops.lora import NO_ADAPTERS, Adapt, LayerAdapters, LayerLora, LoraRows, bind_layers
from stepgraph.ops.lora.triton_lora import TritonLora
from stepgraph.ops.norm import Norm
from stepgraph.ops.operations import Attend, DecoderShape, Hidden, LayerWeights, Places
from stepgraph.ops.overlap import can_overlap
from stepgraph.ops.unfused import UnfusedOperations
from stepgraph.runtime.regions import region

FIVE = ("norm_qkv_rope_write", "attention", "output_projection", "norm_gate_up_swiglu", "down_projection")
"""The regions of a fused layer, in order: one launch each."""

SIX = ("norm_qkv_projection", "rotary_kv_write", *FIVE[1:])
"""The same where heads are normed, for which a program would have to own whole heads."""

SEVEN = (*SIX[:4], "norm_gate_up_projection", "activation", SIX[-1])
"""The same with adapters. They add to what a projection has written, so its region has their two launches too."""

NINE = (
    "input_norm",
    "qkv_projection",
    "rotary_kv_write",
    "attention",
    "output_projection",
    "post_norm",
    "gate_up_projection",
    "activation",
    "down_projection",
)
"""The same with a library's projections, which add the residual themselves."""

_NORMS = {"qkv": "input_norm", "gate_up": "post_norm"}  # in front of a library's projection


class FusedOperations:
    """float32, bfloat16 and float16, on CUDA. Rows carry no residual of their own: each projection adds it in place.

    Of several ranks, each with a part of a projection, the sum over them adds it.

    Each projection is fused or not by itself, by the number of rows; `describe` says how, and so do a graph's regions.
    With more rows than tiles are measured for, a layer is that of the `unfused` set.

    tiles: by default those measured on this device. overlap: programmatic dependent launch; by default where it exists.
    """

    name = "fused"

    def __init__(self, shape: DecoderShape, tiles: Tiles | None = None, overlap: bool | None = None) -> None:
        device = shape.cos.device
        self._shape = shape
        self._tiles = load_tiles(torch.cuda.get_device_name(device)) if tiles is None else tiles
        self._overlap = can_overlap(device) if overlap is None else overlap
        self._unfused = UnfusedOperations(shape)

    def with_tiles(self, tiles: Tiles) -> FusedOperations:
        """The same with other tiles."""
        return FusedOperations(self._shape, tiles, self._overlap)

    def places(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> Places:
        return Places(positions, block_tables)

    def embed(self, tokens: torch.Tensor, embedding: torch.Tensor) -> Hidden:
        with region("embedding"):
            return Hidden(embed(tokens, embedding, overlap=self._overlap))

    def adapters(self, rows: LoraRows, layers: Sequence[LayerLora]) -> list[LayerAdapters]:
        return bind_layers(TritonLora(rows, self._overlap), layers)

    def layer(
        self,
        hidden: Hidden,
        weights: LayerWeights,
        places: Places,
        kv: torch.Tensor,
        attend: Attend,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> Hidden:
        x = hidden.new
        if len(x) > ROWS[-1]:
            return self._unfused.layer(hidden, weights, places, kv, attend, adapters)
        q = self.queries(x, weights, places, kv, adapters)
        with region("attention"):
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attend(q, kv, attended)
        with region("output_projection"):
            x = self.add("attention_out", attended.flatten(1), weights.attention_out, x, adapters)
        activated = self.activated(x, weights, adapters)
        with region("down_projection"):
            x = self.add("down", activated, weights.down, x, adapters)
        return Hidden(x)

    def head(self, hidden: Hidden, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if hidden.residual is not None:
            return self._unfused.head(hidden, norm, weight)
        x, eps, overlap = hidden.new, self._shape.norm_eps, self._overlap
        tile = self._tile("lm_head", x, weight)
        if tile is not None:
            with region("norm_lm_head"):
                return launches.linear(x, weight, tile, norm=Norm(norm, eps), overlap=overlap)
        with region("final_norm"):
            normed = rms_norm(x, norm, eps, overlap=overlap)
        with region("lm_head"):
            return F.linear(normed, weight)

    def describe(self, weights: LayerWeights, lm_head: torch.Tensor, rows: int) -> dict[str, str]:
        matrices = (weights.qkv, weights.attention_out, weights.gate_up, weights.down, lm_head)
        told = {}
        for operation, weight in zip(OPERATIONS, matrices, strict=True):
            choice = self._choose(operation, rows, weight)
            told[operation] = f"{'library' if choice.tile is None else choice.tile} ({choice.source})"
        return told

    def queries(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        places: Places,
        kv: torch.Tensor,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """x [rows, hidden] to queries [rows, heads, head_dim]; keys and values are written to the cache."""
        shape, overlap = self._shape, self._overlap
        norm = Norm(weights.input_norm, shape.norm_eps)
        tile = self._tile("qkv", x, weights.qkv)
        if tile is not None and adapters.qkv is None and weights.q_norm is None:
            with region("norm_qkv_rope_write"):
                return launches.norm_qkv_rope_write(
                    x, norm, weights.qkv, weights.qkv_bias, places, shape.cos, shape.sin, kv, shape.num_heads, tile,
                    overlap=overlap,
                )  # fmt: skip
        qkv = self._projected("qkv", x, norm, weights.qkv, tile, adapters.qkv, weights.qkv_bias)
        with region("rotary_kv_write"):
            rope_write(
                qkv, places.positions, places.block_tables, shape.cos, shape.sin, kv, shape.num_heads,
                q_norm=weights.q_norm, k_norm=weights.k_norm, eps=norm.eps, overlap=overlap,
            )  # fmt: skip
        return qkv[:, : shape.num_heads * shape.head_dim].view(-1, shape.num_heads, shape.head_dim)

    def activated(self, x: torch.Tensor, weights: LayerWeights, adapters: LayerAdapters = NO_ADAPTERS) -> torch.Tensor:
        """x [rows, hidden] to silu(gate) x up, [rows, intermediate]."""
        norm, overlap = Norm(weights.post_norm, self._shape.norm_eps), self._overlap
        tile = self._tile("gate_up", x, weights.gate_up)
        if tile is not None and adapters.gate_up is None:
            with region("norm_gate_up_swiglu"):
                return launches.norm_gate_up_swiglu(x, norm, weights.gate_up, tile, overlap=overlap)
        gate_up = self._projected("gate_up", x, norm, weights.gate_up, tile, adapters.gate_up)
        with region("activation"):
            return silu_mul(gate_up, overlap=overlap)

    def add(
        self,
        operation: str,
        values: torch.Tensor,
        weight: torch.Tensor,
        x: torch.Tensor,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """values through weight, and through the adapter of its rows, added to x: in place, but for what is summed over
        ranks, which have no adapters."""
        if self._shape.reduce is not None:
            part = self._linear(operation, values, weight)
            with region("all_reduce"):
                return self._shape.reduce(part, x)
        tile = self._tile(operation, values, weight)
        if tile is None:
            x.addmm_(values, weight.t())
        else:
            launches.linear_add(values, weight, x, tile, overlap=self._overlap)
        adapt = adapters.attention_out if operation == "attention_out" else adapters.down
        if adapt is not None:
            adapt(values, x)
        return x

    def _projected(
        self,
        operation: str,
        x: torch.Tensor,
        norm: Norm,
        weight: torch.Tensor,
        tile: Tile | None,
        adapt: Adapt | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x, normed, through weight and bias, and through the adapter of its rows: [rows, out]."""
        overlap = self._overlap
        if tile is not None:
            with region(f"norm_{operation}_projection"):
                out = launches.linear(x, weight, tile, norm=norm, bias=bias, overlap=overlap)
                if adapt is not None:
                    adapt(x, out, norm)
            return out
        with region(_NORMS[operation]):
            normed = rms_norm(x, norm.weight, norm.eps, overlap=overlap)
        with region(f"{operation}_projection"):
            out = F.linear(normed, weight, bias)
            if adapt is not None:
                adapt(normed, out)
        return out

    def _linear(self, operation: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tile = self._tile(operation, x, weight)
        return F.linear(x, weight) if tile is None else launches.linear(x, weight, tile, overlap=self._overlap)

    def _tile(self, operation: str, x: torch.Tensor, weight: torch.Tensor) -> Tile | None:
        return self._choose(operation, len(x), weight).tile

    def _choose(self, operation: str, rows: int, weight: torch.Tensor) -> Choice:
        """What was measured, or Triton where the CUDA kernel does not work."""
        out, width = weight.shape
        choice = self._tiles.choose(operation, out, width, rows)
        pairs = {"qkv": self._shape.head_dim // 2, "gate_up": out // 2}.get(operation)
        if choice.tile is None or choice.tile.kernel != "cuda":
            return choice
        if cuda_projection.supports(choice.tile, rows, weight, pairs):
            return choice
        return replace(choice, tile=by_triton(out, width, rows), source="the CUDA kernel does not work here")
