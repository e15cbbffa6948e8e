"""Paged decode: one program per row and KV head, which loops to the row's own length, read from memory.

No context size is known at launch, so that one captured launch is right for every length.
"""

import torch
import triton
import triton.language as tl


def tile_size(head_bytes: int) -> int:
    """Tokens that a program reads at a time: K and V of three pipeline stages in at most 96 KiB of shared memory."""
    return min(64, max(16, (16 << 10) // head_bytes))


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """See `AttentionBackend.decode`. Launches one kernel and reads nothing on the host; heads contiguous."""
    rows, num_heads, head_dim = q.shape
    block_size, kv_heads = kv.shape[2], kv.shape[3]
    if not rows:
        return
    head_pad = max(16, triton.next_power_of_2(head_dim))
    _decode[(rows, kv_heads)](
        q, kv, block_tables, seq_lens, out, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        block_tables.stride(0), out.stride(0), out.stride(1),
        GROUP=num_heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(num_heads // kv_heads)),  # tl.dot wants 16 rows
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=tile_size(head_pad * kv.element_size()),
    )  # fmt: skip


@triton.jit
def _decode(
    q, kv, block_tables, seq_lens, out, scale_log2,
    q_row, q_head, kv_block, kv_half, kv_token, kv_head_stride, table_row, out_row, out_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(seq_lens + row)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + member
    queries = tl.load(q + row * q_row + heads[:, None] * q_head + dim[None, :], mask=real, other=0.0)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        held = token < length
        block = tl.load(block_tables + row * table_row + token // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        where = block * kv_block + (token % BLOCK_SIZE) * kv_token + kv_head * kv_head_stride
        inside = held[:, None] & (dim < HEAD_DIM)[None, :]
        # Masked loads of V too: a weight of 0 times a NaN in an unused slot would be NaN.
        keys = tl.load(kv + where[:, None] + dim[None, :], mask=inside, other=0.0)
        values = tl.load(kv + kv_half + where[:, None] + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(held[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    # A row without tokens has weighed nothing: exactly 0, whatever lies in its blocks.
    result = tl.where(length > 0, result / total[:, None], 0.0)
    tl.store(out + row * out_row + heads[:, None] * out_head + dim[None, :], result, mask=real)
