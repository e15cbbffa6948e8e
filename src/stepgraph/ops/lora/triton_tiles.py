"""Adapters of many rows: a program belongs to a number of the active adapters and a tile of rows, on tensor cores.

Where no row of the tile has that number it ends at once. An adapter's weights are read once a tile, not once a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.lora.shrunk import Shrunk
from stepgraph.ops.lora.triton_parts import part_blocks, part_columns
from stepgraph.ops.overlap import launched

_ROWS = 64  # of a tile
_CHUNK = 1024  # columns of x that one program of the first launch sums over
_COLUMNS = 256  # of the output, that one program of the second launch writes


def shrink(pair: LoraPair, x: torch.Tensor, step: LoraRows, *, overlap: bool) -> Shrunk:
    """As in `triton_rows`, without a norm."""
    (rows, width), ranks = x.shape, pair.a.shape[1]
    chunks, parts = triton.cdiv(width, _CHUNK), len(pair.ends)
    sums = torch.empty((chunks, rows, ranks), dtype=torch.float32, device=x.device)
    _shrink_tile[(triton.cdiv(rows, _ROWS), step.active * parts, chunks)](
        x, pair.a, sums, step.index, step.slot, rows, width, x.stride(0), pair.a.stride(0),
        PARTS=parts, RANK=pair.rank, CHUNK=_CHUNK, TILE=_ROWS, COLUMNS=64, OVERLAPS=overlap, num_warps=4,
        **launched(overlap),
    )  # fmt: skip
    return Shrunk(sums)


def expand(pair: LoraPair, shrunk: Shrunk, out: torch.Tensor, step: LoraRows, *, overlap: bool) -> None:
    """As in `triton_rows`."""
    chunks, rows, _ = shrunk.sums.shape
    blocks, parts = part_blocks(pair.ends, _COLUMNS)
    _expand_tile[(triton.cdiv(rows, _ROWS), step.active, blocks)](
        shrunk.sums, pair.b, out, step.index, step.slot, rows, out.stride(0), pair.b.stride(0), *parts,
        PARTS=len(pair.ends), RANK=pair.rank, CHUNKS=chunks, TILE=_ROWS, COLUMNS=_COLUMNS, OVERLAPS=overlap,
        num_warps=8, **launched(overlap),
    )  # fmt: skip


@triton.jit
def _shrink_tile(
    x, a, sums, index, slot, rows, width, x_stride, a_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    chunk = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = tl.load(index + row, mask=row < rows, other=-1) == number
    where = tl.max(tl.where(mine, tl.load(slot + row, mask=mine, other=0), -1)).to(tl.int64)
    if OVERLAPS:
        gdc_wait()
    if where >= 0:
        rank = tl.arange(0, RANK)
        weights = a + where * a_stride + (part * RANK + rank)[None, :].to(tl.int64) * width
        inputs = x + row[:, None].to(tl.int64) * x_stride
        total = tl.zeros((TILE, RANK), dtype=tl.float32)
        for start in range(0, CHUNK, COLUMNS):
            column = chunk * CHUNK + start + tl.arange(0, COLUMNS)
            inside = column < width
            values = tl.load(inputs + column[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            factors = tl.load(weights + column[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(values, factors, total, input_precision="ieee")
        if OVERLAPS:
            gdc_launch_dependents()  # late: those of many adapters would take the room of programs that work
        place = sums + (chunk.to(tl.int64) * rows + row)[:, None] * (PARTS * RANK) + (part * RANK + rank)[None, :]
        tl.store(place, total, mask=mine[:, None])


@triton.jit
def _expand_tile(
    sums, b, out, index, slot, rows, out_stride, b_stride,
    first, second, third, blocks_first, blocks_second,
    PARTS: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    block = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = tl.load(index + row, mask=row < rows, other=-1) == number
    where = tl.max(tl.where(mine, tl.load(slot + row, mask=mine, other=0), -1)).to(tl.int64)
    part, column, stop = part_columns(block, first, second, third, blocks_first, blocks_second, COLUMNS)
    columns, rank = column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside = columns < tl.where(where >= 0, stop, 0)
    place = b + where * b_stride + columns[None, :].to(tl.int64) * RANK + rank[:, None]
    weights = tl.load(place, mask=inside[None, :], other=0.0)
    if OVERLAPS:
        gdc_wait()
    if where >= 0:
        total = tl.zeros((TILE, RANK), dtype=tl.float32)
        part_sums = sums + row[:, None].to(tl.int64) * (PARTS * RANK) + (part * RANK + rank)[None, :]
        for _ in tl.static_range(CHUNKS):
            total += tl.load(part_sums, mask=mine[:, None], other=0.0)
            part_sums += rows * (PARTS * RANK)
        added = tl.dot(total.to(b.dtype.element_ty), weights, input_precision="ieee")
        target = out + row[:, None].to(tl.int64) * out_stride + columns[None, :]
        written = mine[:, None] & inside[None, :]
        before = tl.load(target, mask=written, other=0.0).to(tl.float32)
        tl.store(target, before + added, mask=written)
