"""Paged causal attention for any mix of prompts, chunks and single tokens, launched by sizes that a capture fixes.

Each program takes one KV head and some consecutive queries of one request, with all query heads of that KV head as rows
of one product, so that keys and values are read once for them. Which request, it finds in `query_start`.
"""

import torch
import triton
import triton.language as tl

from stepgraph.ops.attention.contract import AttentionShape

_LOG2_E = 1.4426950408889634


def tile_size(head_bytes: int) -> int:
    """Tokens that a program reads at a time: K and V of three pipeline stages in at most 96 KiB of shared memory."""
    return min(64, max(16, (16 << 10) // head_bytes))


def tile_rows(tokens: int, shape: AttentionShape, itemsize: int, num_sms: int) -> int:
    """Rows of a program, queries times heads, as a power of two: 16 to 128, or one query of a larger group.

    As many as still leave every multiprocessor a program where a batch is one long prompt.
    """
    rows = triton.next_power_of_2(max(16, tokens * shape.num_heads // num_sms))
    # float32 is multiplied without tensor cores, and more rows would not fit in the registers.
    room = (32 << 10 if itemsize < 4 else 8 << 10) // (triton.next_power_of_2(shape.head_dim) * itemsize)
    group = shape.num_heads // shape.num_kv_heads
    return max(16, min(128, room, rows), triton.next_power_of_2(group))


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    shape: AttentionShape,
    num_sms: int,
) -> None:
    """See `AttentionBackend.prefill`. Launches one kernel and reads nothing on the host; heads contiguous.

    The launch has room for any way of sharing `q`'s tokens among the requests; programs left over exit at once.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads, requests = kv.shape[3], seq_lens.shape[0]
    if not tokens or not requests:
        return
    head_pad = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // kv_heads
    rows = tile_rows(tokens, shape, kv.element_size(), num_sms)
    _prefill[(kv_heads, tokens // (rows // group) + requests)](
        q, kv, block_tables, seq_lens, query_start, out, requests, shape.scale * _LOG2_E, shape.window or 0,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        block_tables.stride(0), out.stride(0), out.stride(1),
        WINDOWED=shape.window is not None,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=kv.shape[2],
        ROWS=rows,
        TILE=tile_size(head_pad * kv.element_size()),
        num_warps=8 if rows >= 128 or kv.element_size() >= 4 else 4,
        num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "window"])
def _prefill(
    q, kv, block_tables, seq_lens, query_start, out, requests, scale_log2, window,
    q_token, q_head, kv_block, kv_half, kv_token, kv_head_stride, table_row, out_token, out_head,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    request = _request_at(place, query_start, requests, QUERIES)
    first = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - first
    # The last queries see the most, so they begin first.
    part = tl.cdiv(query_len, QUERIES) - 1 - (place - first // QUERIES - request)
    if part < 0:
        return
    begin = part * QUERIES
    before = tl.load(seq_lens + request) - query_len

    row = tl.arange(0, ROWS)
    query = begin + row // GROUP
    dim = tl.arange(0, HEAD_PAD)
    real = ((row < QUERIES * GROUP) & (query < query_len))[:, None] & (dim < HEAD_DIM)[None, :]
    token_row = (first + query).to(tl.int64)[:, None]
    head = (kv_head * GROUP + row % GROUP)[:, None]
    queries = tl.load(q + token_row * q_token + head * q_head + dim[None, :], mask=real, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    kv_here = kv + kv_head * kv_head_stride
    table = block_tables + request.to(tl.int64) * table_row
    position = before + query
    seen = before + tl.minimum(begin + QUERIES, query_len)  # by the last real query of this program
    if WINDOWED:
        masked_from = tl.maximum(before + begin - window + 1, 0)
    else:
        masked_from = (before + begin + 1) // TILE * TILE  # up to here, every query sees every token
        top, total, result = _attend(
            top, total, result, queries, position, kv_here, table, 0, masked_from, scale_log2, window,
            kv_block, kv_half, kv_token, False, False, HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    top, total, result = _attend(
        top, total, result, queries, position, kv_here, table, masked_from, seen, scale_log2, window,
        kv_block, kv_half, kv_token, True, WINDOWED, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip

    # Every real query sees at least its own position, so that `total` is not 0.
    tl.store(out + token_row * out_token + head * out_head + dim[None, :], result / total[:, None], mask=real)


@triton.jit
def _request_at(place, query_start, requests, QUERIES: tl.constexpr):
    """The request of a program. Request r begins at place `query_start[r] // QUERIES + r`, which leaves it enough of
    them wherever it starts, and one too many at times. Counted instead of searched: loads that do not wait for another.
    """
    STEP: tl.constexpr = 256
    begun = tl.zeros([STEP], tl.int32)
    for start in range(0, requests, STEP):
        request = start + tl.arange(0, STEP)
        inside = request < requests
        begins = tl.load(query_start + request, mask=inside, other=0) // QUERIES + request
        begun += (inside & (begins <= place)).to(tl.int32)
    return tl.sum(begun, 0) - 1


@triton.jit
def _attend(
    top, total, result, queries, position, kv, table, begin, stop, scale_log2, window, kv_block, kv_half, kv_token,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the tokens from `begin` to `stop`. Without MASKED they are whole tiles, all of them seen by all queries."""
    dim = tl.arange(0, queries.shape[1])
    token = begin + tl.arange(0, TILE)
    block = tl.load(table + token // BLOCK_SIZE, mask=token < stop, other=0)
    for step in range(0, stop - begin, TILE):  # from 0: Triton 3.9 sees no 16-byte loads in a loop from elsewhere
        token = begin + step + tl.arange(0, TILE)
        where = block.to(tl.int64) * kv_block + (token % BLOCK_SIZE) * kv_token
        inside = (dim < HEAD_DIM)[None, :]
        if MASKED:  # V too: a weight of 0 times NaN in an unused slot is NaN
            inside = inside & (token < stop)[:, None]
        keys = tl.load(kv + where[:, None] + dim[None, :], mask=inside, other=0.0)
        values = tl.load(kv + kv_half + where[:, None] + dim[None, :], mask=inside, other=0.0)
        # Block numbers are read one tile before they are needed.
        block = tl.load(table + (token + TILE) // BLOCK_SIZE, mask=token + TILE < stop, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if MASKED:
            visible = (token < stop)[None, :] & (token[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (position[:, None] - token[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        level = new_top
        if WINDOWED:  # a query whose window begins in a later tile has seen nothing yet
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - level)
        weights = tl.exp2(scores * scale_log2 - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top
    return top, total, result
