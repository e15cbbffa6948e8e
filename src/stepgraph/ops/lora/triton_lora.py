"""Adapters as two launches a projection: A x in pieces of its columns, then B over their sum.

A program belongs to one number of the active adapters and one tile of rows; where no row of the tile has that number
it ends at once, so that a recording for many adapters costs little where there are few. An adapter's weights are read
once a tile of rows, not once a row. Sums are made in a fixed order.

Where the device knows programmatic launches, each kernel starts while the one in front still runs, reads what that one
does not write, and then waits for it in every program, so that whoever waits for the last one waits for all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.lora.contract import LoraPair, LoraRows
from stepgraph.ops.overlap import can_overlap, launched

_CHUNK = 1024  # columns of x that one program of the first launch sums over
_FEW_ROWS, _MANY_ROWS = 16, 64  # rows of a tile
_COLUMNS = 256  # of the output, that one program of the second launch writes


class TritonLora:
    """Captured once a step size: reads the rows' adapters where they lie. Ranks are powers of two of at least 16."""

    def __init__(self, rows: LoraRows) -> None:
        self._rows = rows
        self._overlaps = can_overlap(rows.index.device)

    def __call__(self, pair: LoraPair, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [rows, in], out: [rows, out], added to in place; both contiguous within a row."""
        (rows, width), rank, parts, step = x.shape, pair.rank, len(pair.ends), self._rows
        tile = _FEW_ROWS if rows <= _FEW_ROWS else _MANY_ROWS
        tiles, chunks = triton.cdiv(rows, tile), triton.cdiv(width, _CHUNK)
        launch = launched(self._overlaps)
        shrunk = torch.empty((chunks, rows, parts * rank), dtype=torch.float32, device=x.device)
        _shrink[(tiles, step.active * parts, chunks)](
            x, pair.a, shrunk, step.index, step.slot, rows, width, x.stride(0), pair.a.stride(0),
            PARTS=parts, RANK=rank, CHUNK=_CHUNK, TILE=tile, COLUMNS=128 if tile == _FEW_ROWS else 64,
            OVERLAPS=self._overlaps, num_warps=4, **launch,
        )  # fmt: skip
        first, second, third = (*pair.ends, *pair.ends[-1:] * 2)[:3]
        starts = zip((0, first, second), (first, second, third), strict=True)
        blocks = [triton.cdiv(stop - start, _COLUMNS) for start, stop in starts]
        _expand[(tiles, step.active, sum(blocks))](
            shrunk, pair.b, out, step.index, step.slot, rows, out.stride(0), pair.b.stride(0), chunks,
            first, second, third, blocks[0], blocks[0] + blocks[1],
            PARTS=parts, RANK=rank, TILE=tile, COLUMNS=_COLUMNS, OVERLAPS=self._overlaps,
            num_warps=4 if tile == _FEW_ROWS else 8, **launch,
        )  # fmt: skip


@triton.jit
def _shrink(
    x, a, shrunk, index, slot, rows, width, x_stride, a_stride,
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
        place = shrunk + (chunk.to(tl.int64) * rows + row)[:, None] * (PARTS * RANK) + (part * RANK + rank)[None, :]
        tl.store(place, total, mask=mine[:, None])


@triton.jit
def _expand(
    shrunk, b, out, index, slot, rows, out_stride, b_stride, chunks,
    first, second, third, blocks_first, blocks_second,
    PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    block = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = tl.load(index + row, mask=row < rows, other=-1) == number
    where = tl.max(tl.where(mine, tl.load(slot + row, mask=mine, other=0), -1)).to(tl.int64)
    # Which of the joined projections these columns belong to.
    in_second, in_third = block >= blocks_first, block >= blocks_second
    part = in_second.to(tl.int32) + in_third.to(tl.int32)
    column = tl.where(
        in_third, second - blocks_second * COLUMNS, tl.where(in_second, first - blocks_first * COLUMNS, 0)
    )
    column += block * COLUMNS
    stop = tl.where(in_third, third, tl.where(in_second, second, first))
    columns, rank = column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside = columns < tl.where(where >= 0, stop, 0)
    place = b + where * b_stride + columns[None, :].to(tl.int64) * RANK + rank[:, None]
    weights = tl.load(place, mask=inside[None, :], other=0.0)
    if OVERLAPS:
        gdc_wait()
    if where >= 0:
        total = tl.zeros((TILE, RANK), dtype=tl.float32)
        part_sums = shrunk + row[:, None].to(tl.int64) * (PARTS * RANK) + (part * RANK + rank)[None, :]
        for _ in range(0, chunks):
            total += tl.load(part_sums, mask=mine[:, None], other=0.0)
            part_sums += rows * (PARTS * RANK)
        added = tl.dot(total.to(b.dtype.element_ty), weights, input_precision="ieee")
        target = out + row[:, None].to(tl.int64) * out_stride + columns[None, :]
        written = mine[:, None] & inside[None, :]
        before = tl.load(target, mask=written, other=0.0).to(tl.float32)
        tl.store(target, before + added, mask=written)
