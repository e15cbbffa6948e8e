"""The output columns of joined projections in blocks, of which none has columns of two parts."""

from __future__ import annotations

import triton
import triton.language as tl


def part_blocks(ends: tuple[int, ...], columns: int) -> tuple[int, tuple[int, int, int, int, int]]:
    """How many blocks there are, and what a kernel hands to `part_columns`.

    ends: where the parts end, up to three. columns: of a block.
    """
    first, second, third = (*ends, *ends[-1:] * 2)[:3]
    starts = zip((0, first, second), (first, second, third), strict=True)
    blocks = [triton.cdiv(stop - start, columns) for start, stop in starts]
    return sum(blocks), (first, second, third, blocks[0], blocks[0] + blocks[1])


@triton.jit
def part_columns(block, first, second, third, blocks_first, blocks_second, COLUMNS: tl.constexpr):
    """Of a block: its part, its first column, and where the part ends."""
    in_second, in_third = block >= blocks_first, block >= blocks_second
    part = in_second.to(tl.int32) + in_third.to(tl.int32)
    column = tl.where(
        in_third, second - blocks_second * COLUMNS, tl.where(in_second, first - blocks_first * COLUMNS, 0)
    )
    stop = tl.where(in_third, third, tl.where(in_second, second, first))
    return part, column + block * COLUMNS, stop
