"""The launches of the fused projections: from tensors and a tile to a grid, of the kernel that the tile names."""

from __future__ import annotations

import torch
import triton

from stepgraph.ops.fused import projections as kernels
from stepgraph.ops.fused.cuda_projection import Turn, project
from stepgraph.ops.fused.tiling import Tile
from stepgraph.ops.norm import Norm
from stepgraph.ops.operations import Places
from stepgraph.ops.overlap import launched


def norm_qkv_rope_write(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: Places,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    num_heads: int,
    tile: Tile,
    *,
    overlap: bool,
) -> torch.Tensor:
    """As `ops/layer.norm_qkv_rope_write`, without norms of heads. Returns q [rows, heads, head_dim], contiguous.

    cos, sin: as in `DecoderShape`. tile: of at least 2 outputs, which are pairs of a head's elements.
    """
    rows, width = x.shape
    _, _, block_size, kv_heads, head_dim = kv.shape
    q = torch.empty(rows, num_heads, head_dim, dtype=x.dtype, device=x.device)
    if tile.kernel == "cuda":
        turn = Turn(places.positions, places.block_tables, cos, sin, kv, num_heads)
        both = (norm.weight, norm.eps)
        project("QKV", x, weight, q, tile, norm=both, bias=bias, turn=turn, overlap=overlap)
        return q
    grid = (triton.cdiv(head_dim, tile.outputs), num_heads + 2 * kv_heads)
    kernels.norm_qkv_rope_write[grid](
        x, norm.weight, weight, weight if bias is None else bias, places.positions, places.block_tables, cos, sin,
        q, kv, norm.eps, rows,
        x.stride(0), places.block_tables.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
        NUM_HEADS=num_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size,
        HAS_BIAS=bias is not None, **_shared(width, rows, tile, overlap),
    )  # fmt: skip
    return q


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    overlap: bool,
) -> torch.Tensor:
    """x [rows, in], normed where a norm is given, through weight [out, in], plus bias [out]; [rows, out]."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _linear(x, weight, out, tile, norm, bias, add=False, overlap=overlap)
    return out


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, tile: Tile, *, overlap: bool) -> None:
    """x [rows, in] through weight [out, in] is added to residual [rows, out], in place. Not of x itself."""
    _linear(x, weight, residual, tile, None, None, add=True, overlap=overlap)


def norm_gate_up_swiglu(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor, tile: Tile, *, overlap: bool
) -> torch.Tensor:
    """As `ops/layer.norm_gate_up_swiglu`: [rows, intermediate]."""
    rows, width = x.shape
    size = len(weight) // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if tile.kernel == "cuda":
        project("SWIGLU", x, weight, out, tile, norm=(norm.weight, norm.eps), overlap=overlap)
        return out
    kernels.norm_gate_up_swiglu[(triton.cdiv(size, tile.outputs // 2),)](
        x, norm.weight, weight, out, norm.eps, rows, size, x.stride(0), out.stride(0),
        **_shared(width, rows, tile, overlap),
    )  # fmt: skip
    return out


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    norm: Norm | None,
    bias: torch.Tensor | None,
    *,
    add: bool,
    overlap: bool,
) -> None:
    if tile.kernel == "cuda":
        both = None if norm is None else (norm.weight, norm.eps)
        project("ADD" if add else "STORE", x, weight, out, tile, norm=both, bias=bias, overlap=overlap)
        return
    rows, width = x.shape
    kernels.linear[(triton.cdiv(len(weight), tile.outputs),)](
        x, weight if norm is None else norm.weight, weight, weight if bias is None else bias, out,
        0.0 if norm is None else norm.eps, rows, len(weight), x.stride(0), out.stride(0),
        NORM=norm is not None, HAS_BIAS=bias is not None, ADD=add, **_shared(width, rows, tile, overlap),
    )  # fmt: skip


def _shared(width: int, rows: int, tile: Tile, overlap: bool) -> dict[str, int | bool]:
    return {
        "K": width,
        "OUTPUTS": tile.outputs,
        "TILE": tile.columns,
        "PADDED": 1 if rows == 1 else max(16, triton.next_power_of_2(rows)),
        "PDL": overlap,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **launched(overlap),
    }
