"""A decoder layer as two launches for up to 8 rows, as five for small batches; a projection for which a library is
faster is the library's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from stepgraph.ops.fused import cuda_chain, cuda_projection, launches
from stepgraph.ops.fused.cuda_chain import CudaChain, Link
from stepgraph.ops.fused.cuda_projection import Turn
from stepgraph.ops.fused.launches import Norm
from stepgraph.ops.fused.small import embed, rms_norm, rope_write
from stepgraph.ops.fused.tiling import LAYER, OPERATIONS, Choice, Tile, Tiles, by_triton, load_tiles
from stepgraph.ops.lora import NO_ADAPTERS, LayerAdapters, LayerLora, LoraRows, bind_layers
from stepgraph.ops.lora.triton_lora import TritonLora
from stepgraph.ops.operations import Attend, DecoderShape, Hidden, LayerWeights, Places
from stepgraph.ops.overlap import can_overlap
from stepgraph.ops.unfused.kernels import silu_mul
from stepgraph.runtime.regions import region

TWO = ("projections", "attention")
"""The regions of a layer whose projections are chained: those from the attention of the layer in front of it to its own,
in one launch. Behind the last layer there is one more."""

THREE = ("projections", "rotary_kv_write", "attention")
"""The same where heads are normed, for which a program would have to own whole heads."""

FIVE = ("norm_qkv_rope_write", "attention", "output_projection", "norm_gate_up_swiglu", "down_projection")
"""The regions of a fused layer that is not chained, in order: one launch each."""

SIX = ("norm_qkv_projection", "rotary_kv_write", *FIVE[1:])
"""The same where heads are normed."""

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
"""The same with a library's projections, which add the residual themselves; and with adapters."""


@dataclass(frozen=True)
class Unfinished(Hidden):
    """Rows to which `links` are still to be done: they go into one launch, of `tile`, with what follows."""

    links: tuple[Link, ...] = field(kw_only=True)
    tile: Tile = field(kw_only=True)


class FusedOperations:
    """float32, bfloat16 and float16, on CUDA. Rows carry no residual of their own: each projection adds it in place.

    All projections between two attentions are one launch (a chain), or each is fused or not by itself, by the number of
    rows; `describe` says how, and so do a graph's regions.

    Of several ranks, each has a part of a projection, and the sum over them adds it; nothing is chained then.

    tiles: by default those measured on this device. overlap: programmatic dependent launch; by default where it exists.
    """

    name = "fused"

    def __init__(self, shape: DecoderShape, tiles: Tiles | None = None, overlap: bool | None = None) -> None:
        device = shape.cos.device
        self._shape = shape
        self._tiles = load_tiles(torch.cuda.get_device_name(device)) if tiles is None else tiles
        self._overlap = can_overlap(device) if overlap is None else overlap
        self._chain = CudaChain(device, overlap=self._overlap)

    def places(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> Places:
        return Places(positions, block_tables)

    def embed(self, tokens: torch.Tensor, embedding: torch.Tensor) -> Hidden:
        with region("embedding"):
            return Hidden(embed(tokens, embedding, overlap=self._overlap))

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
        tile = None if adapters != NO_ADAPTERS else self._choose_chain(len(hidden.new), weights).tile
        if tile is not None:
            return self._chained(hidden, weights, places, kv, attend, tile)
        x = self._finished(hidden)
        q = self.queries(x, weights, places, kv, adapters)
        attended = _attended(q, kv, attend)
        with region("output_projection"):
            x = self.add("attention_out", attended, weights.attention_out, x, adapters)
        activated = self.activated(x, weights, adapters)
        with region("down_projection"):
            x = self.add("down", activated, weights.down, x, adapters)
        return Hidden(x)

    def final_norm(self, hidden: Hidden, weight: torch.Tensor) -> torch.Tensor:
        x = self._finished(hidden)
        with region("final_norm"):
            return rms_norm(x, weight, self._shape.norm_eps, overlap=self._overlap)

    def lm_head(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with region("lm_head"):
            return self._linear("lm_head", normed, weight)

    def describe(self, weights: LayerWeights, lm_head: torch.Tensor, rows: int) -> dict[str, str]:
        """What each projection is for a batch of so many rows, and on what figures."""
        matrices = (weights.qkv, weights.attention_out, weights.gate_up, weights.down, lm_head)
        chosen = {
            operation: self._choose(operation, rows, weight)
            for operation, weight in zip(OPERATIONS, matrices, strict=True)
        }
        chain = self._choose_chain(rows, weights)
        if chain.tile is not None:
            chosen = {LAYER: chain, "lm_head": chosen["lm_head"]}
        return {
            operation: f"{'library' if choice.tile is None else choice.tile} ({choice.source})"
            for operation, choice in chosen.items()
        }

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
        tile = None if adapters.qkv is not None else self._tile("qkv", x, weights.qkv)
        if tile is not None and weights.q_norm is None:
            with region("norm_qkv_rope_write"):
                return launches.norm_qkv_rope_write(
                    x, norm, weights.qkv, weights.qkv_bias, places, shape.cos, shape.sin, kv, shape.num_heads, tile,
                    overlap=overlap,
                )  # fmt: skip
        if tile is not None:
            with region("norm_qkv_projection"):
                qkv = launches.linear(x, weights.qkv, tile, norm=norm, bias=weights.qkv_bias, overlap=overlap)
        else:
            with region("input_norm"):
                normed = rms_norm(x, norm.weight, norm.eps, overlap=overlap)
            with region("qkv_projection"):
                qkv = F.linear(normed, weights.qkv, weights.qkv_bias)
                if adapters.qkv is not None:
                    adapters.qkv(normed, qkv)
        with region("rotary_kv_write"):
            rope_write(
                qkv, places.positions, places.block_tables, shape.cos, shape.sin, kv, shape.num_heads,
                q_norm=weights.q_norm, k_norm=weights.k_norm, eps=norm.eps, overlap=overlap,
            )  # fmt: skip
        return qkv[:, : shape.num_heads * shape.head_dim].view(-1, shape.num_heads, shape.head_dim)

    def activated(self, x: torch.Tensor, weights: LayerWeights, adapters: LayerAdapters = NO_ADAPTERS) -> torch.Tensor:
        """x [rows, hidden] to silu(gate) x up, [rows, intermediate]."""
        norm, overlap = Norm(weights.post_norm, self._shape.norm_eps), self._overlap
        tile = None if adapters.gate_up is not None else self._tile("gate_up", x, weights.gate_up)
        if tile is not None:
            with region("norm_gate_up_swiglu"):
                return launches.norm_gate_up_swiglu(x, norm, weights.gate_up, tile, overlap=overlap)
        with region("post_norm"):
            normed = rms_norm(x, norm.weight, norm.eps, overlap=overlap)
        with region("gate_up_projection"):
            gate_up = F.linear(normed, weights.gate_up)
            if adapters.gate_up is not None:
                adapters.gate_up(normed, gate_up)
        with region("activation"):
            return silu_mul(gate_up)

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

    def _linear(self, operation: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tile = self._tile(operation, x, weight)
        if tile is None:
            return F.linear(x, weight)
        if tile.kernel == "chain":
            out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
            self._chain.launch([Link("STORE", x, weight, out)], tile)
            return out
        return launches.linear(x, weight, tile, overlap=self._overlap)

    def _chained(
        self, hidden: Hidden, weights: LayerWeights, places: Places, kv: torch.Tensor, attend: Attend, tile: Tile
    ) -> Unfinished:
        """A layer up to its attention, behind what is still to be done; what comes after that is left to be done."""
        shape, x = self._shape, hidden.new
        rows, heads, head_dim = len(x), shape.num_heads, shape.head_dim

        def new(*size: int) -> torch.Tensor:
            return torch.empty(rows, *size, dtype=x.dtype, device=x.device)

        before = hidden.links if isinstance(hidden, Unfinished) else ()
        norm = (weights.input_norm, shape.norm_eps)
        if weights.q_norm is None:
            q = new(heads, head_dim)
            turn = Turn(places.positions, places.block_tables, shape.cos, shape.sin, kv, heads)
            last = Link("QKV", x, weights.qkv, q, norm, weights.qkv_bias, turn)
        else:
            qkv = new(len(weights.qkv))
            last = Link("STORE", x, weights.qkv, qkv, norm, weights.qkv_bias)
        with region("projections"):
            self._chain.launch([*before, last], tile)
        if weights.q_norm is not None:
            with region("rotary_kv_write"):
                rope_write(
                    qkv, places.positions, places.block_tables, shape.cos, shape.sin, kv, heads,
                    q_norm=weights.q_norm, k_norm=weights.k_norm, eps=shape.norm_eps, overlap=self._overlap,
                )  # fmt: skip
            q = qkv[:, : heads * head_dim].view(rows, heads, head_dim)
        attended = _attended(q, kv, attend)
        activated = new(len(weights.gate_up) // 2)
        norm = (weights.post_norm, shape.norm_eps)
        links = (
            Link("ADD", attended, weights.attention_out, x),
            Link("SWIGLU", x, weights.gate_up, activated, norm),
            Link("ADD", activated, weights.down, x),
        )
        return Unfinished(x, links=links, tile=tile)

    def _finished(self, hidden: Hidden) -> torch.Tensor:
        """The rows, with nothing left to be done to them."""
        if isinstance(hidden, Unfinished):
            with region("projections"):
                self._chain.launch(hidden.links, hidden.tile)
        return hidden.new

    def _choose_chain(self, rows: int, weights: LayerWeights) -> Choice:
        """With a tile where a layer's projections are chained. By the size of its last one."""
        choice = self._tiles.choose(LAYER, *weights.down.shape, rows)
        if self._shape.reduce is not None:
            return replace(choice, tile=None, source="sums over ranks stand between the projections")
        tile = choice.tile
        if tile is None or tile.kernel != "chain":
            return replace(choice, tile=None)
        pairs = self._shape.head_dim // 2 if weights.q_norm is None else None
        matrices = ((weights.qkv, pairs), (weights.attention_out, None), (weights.down, None))
        if all(cuda_chain.supports(tile, rows, weight, of) for weight, of in matrices) and cuda_chain.supports(
            tile, rows, weights.gate_up, len(weights.gate_up) // 2
        ):
            return choice
        return replace(choice, tile=None, source="chains do not work here")

    def _tile(self, operation: str, x: torch.Tensor, weight: torch.Tensor) -> Tile | None:
        return self._choose(operation, len(x), weight).tile

    def _choose(self, operation: str, rows: int, weight: torch.Tensor) -> Choice:
        """What was measured, or Triton where the CUDA kernel does not work."""
        out, width = weight.shape
        choice = self._tiles.choose(operation, out, width, rows)
        if choice.tile is not None and choice.tile.kernel == "chain" and cuda_chain.supports(choice.tile, rows, weight):
            return choice
        pairs = {"qkv": self._shape.head_dim // 2, "gate_up": out // 2}.get(operation)
        if choice.tile is None or choice.tile.kernel == "triton":
            return choice
        if choice.tile.kernel == "cuda" and cuda_projection.supports(choice.tile, rows, weight, pairs):
            return choice
        return replace(choice, tile=by_triton(out, width, rows), source="the CUDA kernel does not work here")


def _attended(q: torch.Tensor, kv: torch.Tensor, attend: Attend) -> torch.Tensor:
    """[rows, heads x head_dim]."""
    with region("attention"):
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend(q, kv, attended)
    return attended.flatten(1)
