"""The end of a decode step on a GPU: one launch, a lane a row.

It starts while the kernel in front ends, where the device can, and waits for it. It does not let the next one start:
that one may read before its wait what is advanced here.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from stepgraph.ops.overlap import can_overlap, launched

_ROWS = 128  # of a program


def advance_triton(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    limits: torch.Tensor,
    stops: torch.Tensor,
    mailboxes: torch.Tensor,
    told: torch.Tensor,
    halt: torch.Tensor,
    block_size: int,
) -> None:
    """`advance` for CUDA tensors; see there."""
    rows = tokens.shape[0]
    if not rows:
        return
    overlap = can_overlap(tokens.device)
    _advance[(triton.cdiv(rows, _ROWS),)](
        tokens, positions, seq_lens, block_tables, block_tables.stride(0), block_tables.shape[1], limits, stops,
        mailboxes, told, halt, rows,
        IDS=stops.shape[1], LINES=told.shape[1], BLOCK_SIZE=block_size, ROWS=_ROWS, PDL=overlap, num_warps=4,
        **launched(overlap),
    )  # fmt: skip


@triton.jit
def _advance(
    tokens, positions, seq_lens, tables, table_stride, num_blocks, limits, stops, mailboxes, told, halt, rows,
    IDS: tl.constexpr, LINES: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    length = tl.load(seq_lens + row, real, 0)
    alive = length > 0
    token = tl.where(alive, tl.load(tokens + row, real, 0), 0)
    position = tl.load(positions + row, real, 0) + alive.to(tl.int64)
    length += alive.to(tl.int32)
    limit = tl.load(limits + row, real, 0)
    ended = alive & (limit > 0) & (length >= limit)
    for index in tl.static_range(IDS):
        ended = ended | (alive & (token == tl.load(stops + row * IDS + index, real, -1)))
    mailbox = tl.load(mailboxes + row, real, 0)
    tl.store(told + mailbox * LINES + position % LINES, tl.where(ended, ~token, token), alive)
    table = tables + row.to(tl.int64) * table_stride
    next_block = tl.minimum(position // BLOCK_SIZE, num_blocks - 1)
    stuck = alive & ~ended & (tl.load(table + next_block, alive, 1) == 0)
    tl.store(halt + tl.zeros_like(row), 1, ended | stuck)  # whichever lane does it
    tl.store(tokens + row, token, real)
    tl.store(positions + row, tl.where(ended, 0, position), real)
    tl.store(seq_lens + row, tl.where(ended, 0, length), real)
    tl.store(table, 0, ended)
