"""The small kernels between projections: what is left where a projection is a library's. All arithmetic is float32.

Each waits for the kernel in front before it does anything, and lets the next one start at once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.overlap import launched


def embed(tokens: torch.Tensor, embedding: torch.Tensor, *, overlap: bool) -> torch.Tensor:
    """The rows' embeddings [rows, hidden]. tokens: int64 [rows]. embedding: [vocab, hidden].

    A step begins here, so it is never launched before the kernel in front has ended, whatever that one wrote.
    """
    rows, hidden = len(tokens), embedding.shape[1]
    out = torch.empty(rows, hidden, dtype=embedding.dtype, device=embedding.device)
    block = min(triton.next_power_of_2(hidden), 1024)
    _embed[(rows, triton.cdiv(hidden, block))](
        tokens, embedding, out, hidden, embedding.stride(0), BLOCK=block, PDL=overlap, num_warps=4
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, overlap: bool) -> torch.Tensor:
    """RMSNorm of x [rows, hidden]."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _rms_norm[(rows,)](
        x, weight, out, eps, hidden, BLOCK=block, PDL=overlap, num_warps=min(max(block // 512, 1), 16),
        **launched(overlap),
    )  # fmt: skip
    return out


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    overlap: bool,
) -> None:
    """Rotary embedding of Q in place, and K and V to their places in the cache, K rotated; norms of heads before that.

    qkv: [rows, (heads + 2 x kv_heads) x head_dim]. cos, sin: as in `DecoderShape`. q_norm, k_norm: [head_dim].
    kv: [blocks, 2, block_size, kv_heads, head_dim].
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    half = head_dim // 2
    _rope_write[(len(qkv), num_heads + 2 * kv_heads)](
        qkv, positions, block_tables, cos, sin, kv,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
        eps, qkv.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
        NUM_HEADS=num_heads, KV_HEADS=kv_heads, BLOCK_SIZE=block_size, HAS_NORM=q_norm is not None,
        HALF=half, HALF_PAD=triton.next_power_of_2(half), PDL=overlap, num_warps=1, **launched(overlap),
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor, *, overlap: bool) -> torch.Tensor:
    """silu(gate) x up. gate_up: [rows, 2 x intermediate], gate first. Returns [rows, intermediate]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, 1024))](
        gate_up, out, size, gate_up.stride(0), BLOCK=1024, PDL=overlap, num_warps=4, **launched(overlap)
    )
    return out


@triton.jit
def _embed(tokens, embedding, out, hidden, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    token = tl.load(tokens + row)
    tl.store(out + row * hidden + column, tl.load(embedding + token * stride + column, mask=inside), mask=inside)


@triton.jit
def _rms_norm(x, weight, out, eps, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values) / hidden
    tl.store(out + start + column, values * tl.rsqrt(mean_square + eps) * scale, mask=inside)


@triton.jit
def _rope_write(
    qkv, positions, block_tables, cos, sin, kv, q_norm, k_norm, eps,
    row_stride, table_stride, kv_block, kv_half, kv_token,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, HALF_PAD)
    inside = dim < HALF
    low = qkv + row * row_stride + head * (2 * HALF) + dim
    position = tl.load(positions + row)
    a = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + KV_HEADS:
        if HAS_NORM:
            factor = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
            norm = k_norm
            if head < NUM_HEADS:
                norm = q_norm
            a *= factor * tl.load(norm + dim, mask=inside, other=0.0).to(tl.float32)
            b *= factor * tl.load(norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)
        angle = position * (2 * HALF) + dim
        cos_a = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        a, b = a * cos_a + b * sin_a, b * cos_b + a * sin_b
    place = low
    if head >= NUM_HEADS:
        number = head - NUM_HEADS
        block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        start = (number // KV_HEADS) * kv_half + (position % BLOCK_SIZE) * kv_token + (number % KV_HEADS) * (2 * HALF)
        place = kv + block * kv_block + start + dim
    tl.store(place, a, mask=inside)
    tl.store(place + HALF, b, mask=inside)


@triton.jit
def _silu_mul(gate_up, out, size, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gate * tl.sigmoid(gate) * up, mask=inside)
