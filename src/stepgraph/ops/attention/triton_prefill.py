"""Paged causal prefill: one program per request, tile of queries and query head."""

import torch
import triton
import triton.language as tl

from stepgraph.ops.attention.contract import AttentionShape

_LOG2_E = 1.4426950408889634


def tile_size(head_bytes: int) -> int:
    """Tokens that a program reads at a time: K and V of three pipeline stages in at most 96 KiB of shared memory."""
    return min(64, max(16, (16 << 10) // head_bytes))


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    shape: AttentionShape,
    max_query_len: int,
) -> None:
    """See `AttentionBackend.prefill`. Launches for `max_query_len`, reads nothing on the host; heads contiguous."""
    _, num_heads, head_dim = q.shape
    block_size, kv_heads = kv.shape[2], kv.shape[3]
    requests = seq_lens.shape[0]
    if not requests or max_query_len < 1:
        return
    head_pad = max(16, triton.next_power_of_2(head_dim))
    tile = tile_size(head_pad * kv.element_size())
    _prefill[(requests, triton.cdiv(max_query_len, tile), num_heads)](
        q, kv, block_tables, seq_lens, query_start, out, shape.scale * _LOG2_E, shape.window or 0,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        block_tables.stride(0), out.stride(0), out.stride(1),
        WINDOWED=shape.window is not None,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=tile,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _prefill(
    q, kv, block_tables, seq_lens, query_start, out, scale_log2, window,
    q_token, q_head, kv_block, kv_half, kv_token, kv_head_stride, table_row, out_token, out_head,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2)
    first = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - first
    length = tl.load(seq_lens + request)
    begin = tl.program_id(1) * TILE
    end = tl.minimum(begin + TILE, query_len)

    query = begin + tl.arange(0, TILE)
    position = length - query_len + query
    dim = tl.arange(0, HEAD_PAD)
    real = (query < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
    token_row = (first + query).to(tl.int64)[:, None]
    queries = tl.load(q + token_row * q_token + head * q_head + dim[None, :], mask=real, other=0.0)

    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, HEAD_PAD], tl.float32)
    # The last real query of the tile sees this many tokens; a tile past the end of the queries sees none.
    seen = tl.where(begin < query_len, length - query_len + end, 0)
    earliest = 0
    if WINDOWED:
        earliest = tl.maximum(length - query_len + begin - window + 1, 0)
    for start in range(earliest, seen, TILE):
        token = start + tl.arange(0, TILE)
        held = token < seen
        block = tl.load(block_tables + request * table_row + token // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        where = block * kv_block + (token % BLOCK_SIZE) * kv_token + (head // GROUP) * kv_head_stride
        inside = held[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(kv + where[:, None] + dim[None, :], mask=inside, other=0.0)
        values = tl.load(kv + kv_half + where[:, None] + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        visible = held[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (position[:, None] - token[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        level = new_top
        if WINDOWED:  # a query whose window begins in a later tile has seen nothing yet
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - level)
        weights = tl.exp2(scores - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    # Every real query sees at least its own position, so that `total` is not 0.
    tl.store(out + token_row * out_token + head * out_head + dim[None, :], result / total[:, None], mask=real)
