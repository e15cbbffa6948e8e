"""Adapters of a few rows: a program belongs to one row, and multiplies and sums.

Rows that share an adapter read its weights from the cache. A tensor core's tile of sixteen rows would read them once,
but where adapters are many it has one row in use, and its weights go through shared memory and a chain of dependent
products when the kernel in front has ended.

All weights of a program are asked for at once, before it waits for the kernel in front; what finds them is two loads
that are made together. The second launch begins when all programs of the first have begun, so that B is on its way
while A is multiplied. A program of the first has few ranks and many columns, so there are few sums to add up.

An RMSNorm costs no launch: the first one multiplies x by its weight and sums the squares of x beside, the second scales
by what they say. Rows that are normed first are rounded to the model's dtype before A; here nothing is rounded before
the sum that is added to a projection, so the two differ by that rounding, and this is the nearer one to float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.lora.shrunk import Shrunk
from stepgraph.ops.lora.triton_parts import part_blocks, part_columns
from stepgraph.ops.norm import Norm
from stepgraph.ops.overlap import launched

_TILE, _CHUNK = 4, 2048  # rows and columns of A that one program of the first launch has
_WEIGHTS = 8192  # elements of B that one program of the second launch has


def shrink(pair: LoraPair, x: torch.Tensor, norm: Norm | None, step: LoraRows, *, overlap: bool) -> Shrunk:
    """A of x, normed where a norm is given. x: [rows, in], contiguous within a row."""
    (rows, width), ranks = x.shape, pair.a.shape[1]
    chunks = triton.cdiv(width, _CHUNK)
    sums = torch.empty((chunks, rows, ranks), dtype=torch.float32, device=x.device)
    shrunk = Shrunk(sums)
    if norm is not None:
        shrunk = Shrunk(sums, torch.empty((chunks, rows), dtype=torch.float32, device=x.device), norm.eps)
    _shrink_row[(rows, ranks // _TILE, chunks)](
        x, x if norm is None else norm.weight, pair.a, sums, sums if shrunk.squares is None else shrunk.squares,
        step.index, step.slot, rows, step.active, width, x.stride(0), pair.a.stride(0),
        RANKS=ranks, TILE=_TILE, CHUNK=_CHUNK, NORM=norm is not None, OVERLAPS=overlap,
        num_warps=4, **launched(overlap),
    )  # fmt: skip
    return shrunk


def expand(pair: LoraPair, shrunk: Shrunk, out: torch.Tensor, step: LoraRows, *, overlap: bool) -> None:
    """Adds B to the sums of `shrink`. out: [rows, out], contiguous within a row; in place."""
    sums, squares = shrunk.sums, shrunk.squares
    chunks, rows, ranks = sums.shape
    weights = _WEIGHTS if pair.ends[-1] <= 8192 else 2 * _WEIGHTS  # where that leaves a program for each multiprocessor
    columns = max(weights // pair.rank, 16)
    blocks, parts = part_blocks(pair.ends, columns)
    _expand_row[(rows, blocks)](
        sums, sums if squares is None else squares, pair.b, out, step.index, step.slot, shrunk.eps,
        rows, step.active, pair.a.shape[2], out.stride(0), pair.b.stride(0), *parts,
        RANKS=ranks, RANK=pair.rank, CHUNKS=chunks, COLUMNS=columns, NORM=squares is not None, OVERLAPS=overlap,
        num_warps=weights // 2048, **launched(overlap),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "active"])
def _shrink_row(
    x, norm_weight, a, sums, squares, index, slot, rows, active, width, x_stride, a_stride,
    RANKS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr, OVERLAPS: tl.constexpr,
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
    if NORM:
        scale = tl.load(norm_weight + column, mask=inside, other=0.0)
    if OVERLAPS:
        gdc_wait()
    if has:
        values = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        place = chunk * rows + row
        if NORM:
            if first == 0:  # of the programs of a chunk one tells
                tl.store(squares + place, tl.sum(values * values, axis=0))
            values *= scale.to(tl.float32)
        total = tl.sum(factors.to(tl.float32) * values[None, :], axis=1)
        tl.store(sums + place * RANKS + first + rank, total)


@triton.jit(do_not_specialize=["rows", "active"])
def _expand_row(
    sums, squares, b, out, index, slot, eps, rows, active, width, out_stride, b_stride,
    first, second, third, blocks_first, blocks_second,
    RANKS: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
        mine = sums + row * RANKS + part * RANK + rank
        total = tl.load(mine)
        for chunk in tl.static_range(1, CHUNKS):
            total += tl.load(mine + chunk * rows * RANKS)
        if NORM:
            square = tl.load(squares + row)
            for chunk in tl.static_range(1, CHUNKS):
                square += tl.load(squares + chunk * rows + row)
            total *= tl.rsqrt(square / width + eps)
        tl.store(target, before + tl.sum(weights.to(tl.float32) * total[None, :], axis=1), mask=inside)
