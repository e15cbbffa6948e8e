"""Paged decode with the KV split over programs, in one kernel.

No context size is known at launch: each row is cut by its own length, read from memory, so that one captured launch is
right for every length. Of the programs that share a row, the last one to finish combines what they found.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.attention.decode_plan import SplitPlan
from stepgraph.ops.overlap import launched

_LOG2_E = 1.4426950408889634
_NO_WINDOW = 2**31 - 1


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where programs that share a row leave their parts: allocated once, since a captured graph knows its addresses.

    Kernels that use it must not run at the same time.

    parts: float32 [capacity, num_heads, head_dim], attention to a part of the tokens.
    levels: float32 [capacity, num_heads], the base-2 logarithm of that part's sum of weights.
    arrived: int32 [max_rows, num_kv_heads], 0 between two launches.
    """

    parts: torch.Tensor
    levels: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, plan: SplitPlan, device: torch.device) -> "DecodeWorkspace":
        shape, capacity = plan.shape, plan.capacity
        return cls(
            parts=torch.empty(capacity, shape.num_heads, shape.head_dim, device=device),
            levels=torch.empty(capacity, shape.num_heads, device=device),
            arrived=torch.zeros(plan.max_rows, shape.num_kv_heads, dtype=torch.int32, device=device),
        )


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    plan: SplitPlan,
    workspace: DecodeWorkspace,
) -> None:
    """See `AttentionBackend.decode`. Launches one kernel and reads nothing on the host; heads contiguous."""
    rows, num_heads, head_dim = q.shape
    if not rows:
        return
    config, kv_heads = plan.config, kv.shape[3]
    splits = plan.splits(rows)
    group = num_heads // kv_heads
    head_pad = max(16, triton.next_power_of_2(head_dim))
    part_registers = triton.next_power_of_2(group) * head_pad // (32 * config.num_warps)  # of each thread
    _decode[(kv_heads, splits, rows)](
        q, kv, block_tables, seq_lens, out,
        workspace.parts, workspace.levels, workspace.arrived,
        plan.shape.scale * _LOG2_E, splits, plan.shape.window or _NO_WINDOW,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        block_tables.stride(0), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=kv.shape[2],
        TILE=config.tile(head_pad * kv.element_size()),
        MIN_CHUNK=config.min_chunk,
        PARTS=max(2, min(16, 64 // max(1, part_registers))),
        AHEAD=config.num_stages == 1,
        PDL=config.pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launched(config.pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "window"])
def _decode(
    q, kv, block_tables, seq_lens, out, parts, levels, arrived, scale_log2, splits, window,
    q_row, q_head, kv_block, kv_half, kv_token, kv_head_stride, table_row, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # the fastest: all heads of a token are read at about the same time
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    length = tl.maximum(tl.load(seq_lens + row), 0)
    begin = tl.maximum(length - window, 0)
    # Chunks end at multiples of a block, not of a tile, so that they are of one size.
    chunk = tl.cdiv(tl.cdiv(length - begin, splits), BLOCK_SIZE) * BLOCK_SIZE
    chunk = tl.maximum(chunk, MIN_CHUNK)
    active = tl.maximum(tl.cdiv(length - begin, chunk), 1)  # a row without tokens is written too
    if split >= active:
        if PDL:
            gdc_wait()  # all programs do, so that whoever waits for this kernel waits for all in front of it
        return
    first = begin + split * chunk
    stop = tl.minimum(first + chunk, length)

    GROUP_PAD: tl.constexpr = max(16, triton.next_power_of_2(GROUP))  # tl.dot wants 16 rows
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + member
    kv_here = kv + kv_head * kv_head_stride
    table = block_tables + row * table_row

    blocks = _blocks(table, first, stop, BLOCK_SIZE, TILE)
    if AHEAD:
        # The newest token and the queries may be the work of the kernel in front.
        early = tl.minimum(stop, length - 1) if PDL else stop
        keys, values = _load(kv_here, blocks, first, early, kv_block, kv_half, kv_token, dim, HEAD_DIM, BLOCK_SIZE)
    if PDL:
        gdc_wait()
    if AHEAD:
        if PDL:
            has_newest = early < tl.minimum(stop, first + TILE)
            if has_newest:
                keys, values = _load(
                    kv_here, blocks, first, stop, kv_block, kv_half, kv_token, dim, HEAD_DIM, BLOCK_SIZE
                )
        blocks = _blocks(table, first + TILE, stop, BLOCK_SIZE, TILE)
    queries = tl.load(q + row * q_row + heads[:, None] * q_head + dim[None, :], mask=real, other=0.0)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weighed = tl.zeros([GROUP_PAD, TILE], tl.float32)  # summed at the end: a sum over threads in each tile costs more
    result = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(first, stop, TILE):
        # Block numbers are read one tile before they are needed.
        if AHEAD:
            next_keys, next_values = _load(
                kv_here, blocks, start + TILE, stop, kv_block, kv_half, kv_token, dim, HEAD_DIM, BLOCK_SIZE
            )
            blocks = _blocks(table, start + 2 * TILE, stop, BLOCK_SIZE, TILE)
        else:
            keys, values = _load(kv_here, blocks, start, stop, kv_block, kv_half, kv_token, dim, HEAD_DIM, BLOCK_SIZE)
            blocks = _blocks(table, start + TILE, stop, BLOCK_SIZE, TILE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where((start + tl.arange(0, TILE) < stop)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        weighed = weighed * shrink[:, None] + weights
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top
        if AHEAD:
            keys, values = next_keys, next_values

    total = tl.sum(weighed, 1)
    # A row without tokens has weighed nothing: exactly 0, whatever lies in its blocks.
    result = tl.where(length > 0, result / total[:, None], 0.0)
    out_here = out + row * out_row
    if active == 1:
        tl.store(out_here + heads[:, None] * out_head + dim[None, :], result, mask=real)
    else:
        row_slot = row * splits * (KV_HEADS * GROUP)
        slot = row_slot + split * (KV_HEADS * GROUP) + heads
        tl.store(parts + slot[:, None] * HEAD_DIM + dim[None, :], result, mask=real)
        tl.store(levels + slot, top + tl.log2(total), mask=member < GROUP)
        tl.debug_barrier()  # all threads have stored before one of them counts the program in
        count = arrived + row * KV_HEADS + kv_head
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == active - 1:
            _combine(
                parts, levels, row_slot, kv_head, active, out_here, out_head,
                KV_HEADS, GROUP, HEAD_DIM, HEAD_PAD, PARTS,
            )  # fmt: skip
            tl.store(count, 0)  # for the next launch


@triton.jit
def _blocks(table, start, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of each token of a tile; the null block past the end."""
    token = start + tl.arange(0, TILE)
    return tl.load(table + token // BLOCK_SIZE, mask=token < stop, other=0)


@triton.jit
def _load(kv, blocks, start, stop, kv_block, kv_half, kv_token, dim, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Keys and values [tile, head] of one head. V is masked too: a weight of 0 times NaN in an unused slot is NaN."""
    token = start + tl.arange(0, blocks.shape[0])
    where = blocks.to(tl.int64) * kv_block + (token % BLOCK_SIZE) * kv_token
    inside = (token < stop)[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(kv + where[:, None] + dim[None, :], mask=inside, other=0.0)
    values = tl.load(kv + kv_half + where[:, None] + dim[None, :], mask=inside, other=0.0)
    return keys, values


@triton.jit
def _combine(
    parts, levels, row_slot, kv_head, active, out, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row and KV head, always in the same order. Other programs wrote them: past the L1 cache."""
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    dim = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + member
    top = tl.full([member.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([member.shape[0]], tl.float32)
    result = tl.zeros([member.shape[0], HEAD_PAD], tl.float32)
    for start in range(0, active, PARTS):
        split = start + tl.arange(0, PARTS)
        slot = row_slot + split[None, :] * (KV_HEADS * GROUP) + heads[:, None]
        held = (split < active)[None, :] & (member < GROUP)[:, None]
        level = tl.load(levels + slot, mask=held, other=float("-inf"), cache_modifier=".cg")
        inside = held[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        where = parts + slot[:, :, None] * HEAD_DIM + dim[None, None, :]
        part = tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(level, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(level - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        result = result * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        top = new_top
    real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + heads[:, None] * out_head + dim[None, :], result / total[:, None], mask=real)
