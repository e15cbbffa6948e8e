"""The fused projections in CUDA C++ (cuda_projection.cu), for up to 32 rows of bfloat16 or float16.

What Triton's form lacks: a ring that each warp fills before the kernel in front has ended, as deep as is wanted, and
weights as the wide side of a tensor core's instruction, so that up to 8 rows cost no more than one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from stepgraph.ops import nvrtc
from stepgraph.ops.fused.tiling import CUDA_COLUMNS as STEP
from stepgraph.ops.fused.tiling import Tile, padded
from stepgraph.ops.nvrtc import CudaKernel
from stepgraph.ops.overlap import can_overlap

_MOST_ROWS = 32
_HOPPERS_SHARED_BYTES = 224 << 10  # of a program's rings, at most
_STATIC_BYTES = 3 << 10  # that a program has besides


@dataclass(frozen=True)
class Turn:
    """What QKV does with its result. cos, sin: as in `DecoderShape`. kv: one layer of the cache."""

    positions: torch.Tensor
    block_tables: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv: torch.Tensor
    num_heads: int


def supports(tile: Tile, rows: int, weight: torch.Tensor, pairs: int | None = None) -> bool:
    """Whether the kernel can be built for a weight [out, in]. pairs: outputs from the first of a pair to its second."""
    out, width = weight.shape
    group = out if pairs is None else pairs
    return (
        nvrtc.available()
        and weight.dtype in (torch.bfloat16, torch.float16)
        and rows <= _MOST_ROWS
        and width % STEP == 0
        and group % (tile.outputs if pairs is None else tile.outputs // 2) == 0
        and shared_bytes(tile, rows, norm=True) <= _most_shared_bytes(weight.device)
    )


def shared_bytes(tile: Tile, rows: int, *, norm: bool) -> int:
    """Of the rings of a program."""
    return tile.warps * tile.stages * STEP * 2 * (tile.outputs + padded(rows) + norm)


def project(
    mode: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    bias: torch.Tensor | None = None,
    turn: Turn | None = None,
    overlap: bool,
) -> None:
    """x [rows, in], normed where a norm's weight and epsilon are given, through weight [out, in], plus bias.

    mode: what becomes of the result: `STORE` in out [rows, out]; `ADD` to it; `SWIGLU` of gate and up in out
        [rows, out / 2]; `QKV`: as `turn` says, queries in out [rows, heads, head_dim].
    tile: outputs are a multiple of 16, stages those of the ring. All rows contiguous.
    """
    rows, width = x.shape
    size = x.element_size()
    columns, heads, other = len(weight), 1, 8
    if mode == "SWIGLU":
        other = columns = columns // 2
    if turn is not None:
        head_dim = turn.cos.shape[1]
        heads, other = columns // head_dim, head_dim // 2
        columns = other
    a_program = tile.outputs // 2 if mode in ("SWIGLU", "QKV") else tile.outputs
    params = _Params(
        x=x.data_ptr(), norm=0 if norm is None else norm[0].data_ptr(), weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(), out=out.data_ptr(),
        x_row=x.stride(0) * size, out_row=out.stride(0) * size,
        eps=0.0 if norm is None else norm[1], rows=rows, width=width, other=other,
    )  # fmt: skip
    if turn is not None:
        kv = turn.kv
        params.positions, params.block_tables = turn.positions.data_ptr(), turn.block_tables.data_ptr()
        params.cosine, params.sine, params.kv = turn.cos.data_ptr(), turn.sin.data_ptr(), kv.data_ptr()
        params.kv_block, params.kv_half, params.kv_token = (kv.stride(axis) * size for axis in range(3))
        params.table_row, params.block_size = turn.block_tables.stride(0), kv.shape[2]
        params.num_heads, params.kv_heads = turn.num_heads, kv.shape[3]
    kernel = _kernel(
        mode, norm is not None, bias is not None, x.dtype == torch.bfloat16, overlap, tile, padded(rows), x.device
    )
    shared = shared_bytes(tile, rows, norm=norm is not None)
    kernel.launch((columns // a_program, heads, 1), tile.warps * 32, params, shared_bytes=shared, overlap=overlap)


def compile_ahead(
    mode: str, norm: bool, bias: bool, tile: Tile, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Put the kernel of a projection into the cache of compiled ones; may run in many threads at once."""
    overlap = can_overlap(device)
    defines = _defines(mode, norm, bias, dtype == torch.bfloat16, overlap, tile, padded(rows))
    nvrtc.compile_kernel(_source(), "project", defines)


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "weight", "bias", "out", "positions", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "kv")),
        *((name, ctypes.c_longlong) for name in ("x_row", "out_row", "kv_block", "kv_half", "kv_token", "table_row")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "width", "other", "num_heads", "kv_heads", "block_size")),
    ]


@cache
def _most_shared_bytes(device: torch.device) -> int:
    """Of a program, on the device."""
    if device.type != "cuda":
        return _HOPPERS_SHARED_BYTES  # emulated
    properties: Any = torch.cuda.get_device_properties(device)  # newer than torch's own stubs
    return int(properties.shared_memory_per_block_optin) - _STATIC_BYTES


@cache
def _kernel(
    mode: str, norm: bool, bias: bool, bf16: bool, overlap: bool, tile: Tile, rows: int, device: torch.device
) -> CudaKernel:
    return CudaKernel(_source(), "project", _defines(mode, norm, bias, bf16, overlap, tile, rows))


def _source() -> str:
    return nvrtc.source("stepgraph.ops.fused", "cuda_projection.cu")


def _defines(mode: str, norm: bool, bias: bool, bf16: bool, overlap: bool, tile: Tile, rows: int) -> dict[str, int]:
    return {
        "MODE": ("STORE", "ADD", "SWIGLU", "QKV").index(mode), "NORM": norm, "BIAS": bias, "BF16": bf16, "PDL": overlap,
        "WARPS": tile.warps, "RING": tile.stages, "TILES": tile.outputs // 16, "ROWS": rows,
    }  # fmt: skip
