"""Paged decode in CUDA C++ (cuda_decode.cu), for groups of up to 8 query heads of 64 or 128.

What Triton's form lacks: each warp streams through a ring of its own without barriers, and two layers' programs fit a
multiprocessor, so that the next layer's rings fill while this layer's parts are joined.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import torch

from stepgraph.ops.attention.contract import AttentionShape
from stepgraph.ops.attention.decode_plan import DecodeConfig, SplitPlan
from stepgraph.ops.nvrtc import CudaKernel, source

_LOG2_E = 1.4426950408889634
_NO_WINDOW = 2**31 - 1
_BLOCK_SIZE = 16
# The fastest on an H200 (benchmarks/h200_attention.py). Three halves of a block on their way for each of 8 warps are
# 96 KiB: two programs fit a multiprocessor. A few rows have one program on each, whose rings are deeper, and the next
# kernel's programs find room beside it.
_WARPS = 8
_RING, _DEEP_RING = 3, 4
_FEW = 8  # programs that each row and KV head of a few rows has, at least
_MIN_BLOCKS = 8  # worth a program of their own: one for each warp
_MIN_BLOCKS_FULL = 64  # the same where the batch fills the device without being cut


def supports(shape: AttentionShape) -> bool:
    """Whether the kernel can be built for this shape."""
    group = shape.num_heads // shape.num_kv_heads
    return shape.head_dim in (64, 128) and group <= 8 and shape.block_size == _BLOCK_SIZE


def are_few(shape: AttentionShape, num_sms: int, rows: int) -> bool:
    """Whether so many rows have one program on each multiprocessor."""
    return rows * shape.num_kv_heads * _FEW <= num_sms


def split_plan(shape: AttentionShape, num_sms: int, max_rows: int, max_len: int, *, overlap: bool) -> SplitPlan:
    config = DecodeConfig(num_warps=_WARPS, programs_per_sm=2, min_chunk=_MIN_BLOCKS * _BLOCK_SIZE, pdl=overlap)
    return SplitPlan(shape, config, num_sms, max_rows, max_len)


def workspace_bytes(shape: AttentionShape, num_sms: int, max_rows: int, max_len: int) -> int:
    """Of a `CudaDecode` that is not there."""
    return split_plan(shape, num_sms, max_rows, max_len, overlap=False).workspace_bytes(_WARPS)


class CudaDecode:
    """The kernel and its workspace, allocated once, since a captured graph knows its addresses.

    Launches that share it must not run at the same time.

    max_rows: rows of the largest batch. max_len: tokens of the longest row; longer ones come out right too.
    overlap: programmatic dependent launch (compute capability 9.0 or more); see `DecodeConfig.pdl` for what it asks.
    """

    def __init__(
        self, shape: AttentionShape, device: torch.device, *, num_sms: int, max_rows: int, max_len: int, overlap: bool
    ) -> None:
        self.plan = plan = split_plan(shape, num_sms, max_rows, max_len, overlap=overlap)
        self._few = replace(plan, config=replace(plan.config, programs_per_sm=1))
        slots, heads = plan.capacity, shape.num_heads
        # Parts of a row's attention; the base-2 logarithm of their sums of weights, and how many programs have written
        # theirs, once for each warp, since each vouches for its own slice.
        self.parts = torch.empty(slots, heads, shape.head_dim, device=device)
        self.levels = torch.empty(slots, heads, _WARPS, device=device)
        self.arrived = torch.zeros(max_rows, shape.num_kv_heads, _WARPS, dtype=torch.int32, device=device)

    def splits(self, rows: int) -> int:
        """Programs for each row and KV head; see `SplitPlan`. The workspace has room for more."""
        few = are_few(self.plan.shape, self.plan.num_sms, rows)
        return (self._few if few else self.plan).splits(rows)

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See `AttentionBackend.decode`; bfloat16 or float16. Launches one kernel and reads nothing on the host."""
        rows, num_heads, head_dim = q.shape
        if not rows:
            return
        shape, size = self.plan.shape, kv.element_size()
        overlap = self.plan.config.pdl
        splits = self.splits(rows)
        fills = rows * shape.num_kv_heads >= self.plan.num_sms
        ring = _DEEP_RING if are_few(shape, self.plan.num_sms, rows) else _RING
        params = _Params(
            q.data_ptr(), kv.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(), out.data_ptr(),
            self.parts.data_ptr(), self.levels.data_ptr(), self.arrived.data_ptr(),
            q.stride(0) * size, q.stride(1) * size, *(kv.stride(axis) * size for axis in range(4)),
            block_tables.stride(0), out.stride(0) * size, out.stride(1) * size, shape.scale * _LOG2_E,
            splits, shape.window or _NO_WINDOW, _MIN_BLOCKS_FULL if fills else _MIN_BLOCKS,
        )  # fmt: skip
        kernel = _kernel(head_dim, num_heads // shape.num_kv_heads, ring, q.dtype == torch.bfloat16, overlap, q.device)
        shared = _WARPS * ring * _BLOCK_SIZE * head_dim * size
        kernel.launch((shape.num_kv_heads, splits, rows), _WARPS * 32, params, shared_bytes=shared, overlap=overlap)


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "block_tables", "seq_lens", "out")),
        *((name, ctypes.c_void_p) for name in ("parts", "levels", "arrived")),
        *((name, ctypes.c_longlong) for name in ("q_row", "q_head", "kv_block", "kv_half", "kv_token", "kv_head")),
        *((name, ctypes.c_longlong) for name in ("table_row", "out_row", "out_head")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("splits", "window", "min_blocks")),
    ]


@cache
def _kernel(head_dim: int, group: int, ring: int, bf16: bool, overlap: bool, device: torch.device) -> CudaKernel:
    text = source("stepgraph.ops.attention", "cuda_decode.cu")
    defines = {"HEAD_DIM": head_dim, "GROUP": group, "BF16": bf16, "PDL": overlap}
    return CudaKernel(text, "paged_decode", {**defines, "WARPS": _WARPS, "RING": ring})
