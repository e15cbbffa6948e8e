"""Projections that depend on each other as one launch in CUDA C++ (cuda_chain.cu), for up to 8 rows.

What launches one by one lack, even programmatic ones: as a projection ends, the weights of the next are on their way
already, since the programs stay. All of them meet between two projections.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from stepgraph.ops import nvrtc
from stepgraph.ops.fused.cuda_projection import Turn, source
from stepgraph.ops.fused.tiling import CUDA_COLUMNS as STEP
from stepgraph.ops.fused.tiling import Tile
from stepgraph.ops.nvrtc import CudaKernel

MOST_ROWS = 8
MOST_LINKS = 4
_MODES = ("STORE", "ADD", "SWIGLU", "QKV")
_TILE = 16  # outputs
# Of a program's rings. Never two programs on a multiprocessor, where another would have none; and attention's programs,
# of 96 KiB, find room beside one.
_LEAST_SHARED, _MOST_SHARED = 104 << 10, 117 << 10


@dataclass(frozen=True)
class Link:
    """x [rows, in], normed where a norm's weight and epsilon are given, through weight [out, in], plus bias.

    mode: what becomes of the result: `STORE` in out [rows, out]; `ADD` to it; `SWIGLU` of gate and up in out
        [rows, out / 2]; `QKV`: as `turn` says, queries in out [rows, heads, head_dim]. All rows contiguous.
    """

    mode: str
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    norm: tuple[torch.Tensor, float] | None = None
    bias: torch.Tensor | None = None
    turn: Turn | None = None


def supports(tile: Tile, rows: int, weight: torch.Tensor, pairs: int | None = None) -> bool:
    """Whether the kernel can be built for a weight [out, in]. pairs: outputs from the first of a pair to its second."""
    out, width = weight.shape
    return (
        nvrtc.available()
        and weight.dtype in (torch.bfloat16, torch.float16)
        and rows <= MOST_ROWS
        and width % STEP == 0
        and width // STEP >= tile.warps >= MOST_ROWS * _TILE // 32
        and (out % _TILE if pairs is None else pairs % (_TILE // 2)) == 0
        and shared_bytes(tile, rows) <= _MOST_SHARED
    )


def shared_bytes(tile: Tile, rows: int) -> int:
    """Of the rings of a program."""
    return max(tile.warps * tile.stages * STEP * 2 * (_TILE + _padded(rows) + 1), _LEAST_SHARED)


class CudaChain:
    """Launches chains on one device. Two of them must not run at the same time: each would keep programs of the other
    out, and wait for its own for good (the kernel gives up after some ten seconds).

    overlap: programmatic dependent launch.
    """

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        on_gpu = device.type == "cuda"
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._overlap = overlap

    def launch(self, links: Sequence[Link], tile: Tile) -> None:
        """The links one after the other, each of which may read what those before it write. At most four.

        tile: `stages` of a warp's ring.
        """
        rows, size = len(links[0].x), links[0].x.element_size()
        params = _Params(count=len(links), rows=rows, arrived=self._arrived.data_ptr())
        for place, link in zip(params.links, links, strict=False):
            outputs, width = link.weight.shape
            place.x, place.weight, place.out = link.x.data_ptr(), link.weight.data_ptr(), link.out.data_ptr()
            if link.norm is not None:
                place.norm, place.eps = link.norm[0].data_ptr(), link.norm[1]
            if link.bias is not None:
                place.bias = link.bias.data_ptr()
            place.x_row, place.out_row = link.x.stride(0) * size, link.out.stride(0) * size
            place.mode, place.width, place.tiles, place.other = _MODES.index(link.mode), width, outputs // _TILE, 8
            if link.mode == "SWIGLU":
                place.other = outputs // 2
            if link.turn is not None:
                place.other = link.turn.cos.shape[1] // 2
                _set_turn(params, link.turn, size)
        kernel = _kernel(links[0].x.dtype == torch.bfloat16, self._overlap, tile, _padded(rows), self._arrived.device)
        shared = shared_bytes(tile, rows)
        kernel.launch((self._programs, 1, 1), tile.warps * 32, params, shared_bytes=shared, overlap=self._overlap)


def _set_turn(params: _Params, turn: Turn, size: int) -> None:
    kv = turn.kv
    params.positions, params.block_tables = turn.positions.data_ptr(), turn.block_tables.data_ptr()
    params.cosine, params.sine, params.kv = turn.cos.data_ptr(), turn.sin.data_ptr(), kv.data_ptr()
    params.kv_block, params.kv_half, params.kv_token = (kv.stride(axis) * size for axis in range(3))
    params.table_row, params.block_size = turn.block_tables.stride(0), kv.shape[2]
    params.num_heads, params.kv_heads = turn.num_heads, kv.shape[3]


class _Link(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "weight", "bias", "out")),
        *((name, ctypes.c_longlong) for name in ("x_row", "out_row")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("mode", "width", "tiles", "other")),
    ]


class _Params(ctypes.Structure):
    _fields_ = [
        ("links", _Link * MOST_LINKS),
        *((name, ctypes.c_void_p) for name in ("positions", "block_tables", "cosine", "sine", "kv")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_half", "kv_token", "table_row")),
        ("arrived", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "rows", "num_heads", "kv_heads", "block_size")),
    ]


def _padded(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


@cache
def _kernel(bf16: bool, overlap: bool, tile: Tile, rows: int, device: torch.device) -> CudaKernel:
    text = source("cuda_instructions.cu") + source("cuda_chain.cu")
    defines = {"BF16": bf16, "PDL": overlap, "WARPS": tile.warps, "RING": tile.stages, "ROWS": rows}
    return CudaKernel(text, "chain", defines)
