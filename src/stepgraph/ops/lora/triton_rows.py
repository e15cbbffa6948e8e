"""Adapters of a few rows: a program belongs to one row, and multiplies and sums.

Rows that share an adapter read its weights from the cache. A tensor core's tile of sixteen rows would read them once,
but where adapters are many it has one row in use, and its weights go through shared memory and a chain of dependent
products when the kernel in front has ended.

All weights of a program are asked for at once, before it waits for the kernel in front; what finds them is two loads
that are made together. The second launch begins when all programs of the first have begun, so that B is on its way
while A is multiplied. A program of the first has few ranks and many columns, so there are few sums to add up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.lora.triton_parts import part_blocks, part_columns
from stepgraph.ops.overlap import launched

_TILE, _CHUNK = 4, 2048  # rows and columns of A that one program of the first launch has
_WEIGHTS = 8192  # elements of B that one program of the second launch has


def shrink(pair: LoraPair, x: torch.Tensor, step: LoraRows, *, overlap: bool) -> torch.Tensor:
    """A x in sums over chunks of x's columns: float32 [chunks, rows, parts x rank]. Unset where a row has no adapter.

    x: [rows, in], contiguous within a row.
    """
    (rows, width), ranks = x.shape, pair.a.shape[1]
    chunks = triton.cdiv(width, _CHUNK)
    shrunk = torch.empty((chunks, rows, ranks), dtype=torch.float32, device=x.device)
    _shrink_row[(rows, ranks // _TILE, chunks)](
        x, pair.a, shrunk, step.index, step.slot, rows, step.active, width, x.stride(0), pair.a.stride(0),
        RANKS=ranks, TILE=_TILE, CHUNK=_CHUNK, OVERLAPS=overlap, num_warps=4, **launched(overlap),
    )  # fmt: skip
    return shrunk


def expand(pair: LoraPair, shrunk: torch.Tensor, out: torch.Tensor, step: LoraRows, *, overlap: bool) -> None:
    """Adds B to the sums of `shrink`. out: [rows, out], contiguous within a row; in place."""
    chunks, rows, ranks = shrunk.shape
    weights = _WEIGHTS if pair.ends[-1] <= 8192 else 2 * _WEIGHTS  # where that leaves a program for each multiprocessor
    columns = max(weights // pair.rank, 16)
    blocks, parts = part_blocks(pair.ends, columns)
    _expand_row[(rows, blocks)](
        shrunk, pair.b, out, step.index, step.slot, rows, step.active, out.stride(0), pair.b.stride(0), *parts,
        RANKS=ranks, RANK=pair.rank, CHUNKS=chunks, COLUMNS=columns, OVERLAPS=overlap,
        num_warps=weights // 2048, **launched(overlap),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "active"])
def _shrink_row(
    x, a, shrunk, index, slot, rows, active, width, x_stride, a_stride,
    RANKS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
    row, chunk = tl.program_id(0), tl.program_id(2)
    number, where = tl.load(index + row), tl.load(slot + row).to(tl.int64)
    has = (number >= 0) & (number < active)
    first, rank = tl.program_id(1) * TILE, tl.arange(0, TILE)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < tl.where(has, width, 0)
    weights = a + where * a_stride + first * width + rank[:, None] * width + column[None, :]
    factors = tl.load(weights, mask=inside[None, :], other=0.0)
    if OVERLAPS:
        gdc_wait()
    if has:
        values = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(factors.to(tl.float32) * values[None, :], axis=1)
        tl.store(shrunk + (chunk * rows + row) * RANKS + first + rank, total)


@triton.jit(do_not_specialize=["rows", "active"])
def _expand_row(
    shrunk, b, out, index, slot, rows, active, out_stride, b_stride,
    first, second, third, blocks_first, blocks_second,
    RANKS: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
    row = tl.program_id(0)
    number, where = tl.load(index + row), tl.load(slot + row).to(tl.int64)
    has = (number >= 0) & (number < active)
    part, column, stop = part_columns(tl.program_id(1), first, second, third, blocks_first, blocks_second, COLUMNS)
    columns, rank = column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside = columns < tl.where(has, stop, 0)
    place = b + where * b_stride + columns[:, None] * RANK + rank[None, :]
    weights = tl.load(place, mask=inside[:, None], other=0.0)
    if OVERLAPS:
        gdc_wait()
    if has:
        target = out + row.to(tl.int64) * out_stride + columns
        before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        sums = shrunk + row * RANKS + part * RANK + rank
        total = tl.load(sums)
        for chunk in tl.static_range(1, CHUNKS):
            total += tl.load(sums + chunk * rows * RANKS)
        tl.store(target, before + tl.sum(weights.to(tl.float32) * total[None, :], axis=1), mask=inside)
