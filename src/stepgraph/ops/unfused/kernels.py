"""The small kernels between the projections, each one launch. All arithmetic is float32, rounded where it is stored.

Rows may be padded ones: position 0 and a block table of zeros, so that they rotate by nothing and write to block 0.
Offsets are 64-bit, every tensor is contiguous within a row, and there is at least one row.
"""

import torch
import triton
import triton.language as tl


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x + residual, both [rows, hidden]; the sum replaces `residual`. Without one, of x alone."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        x, x if residual is None else residual, weight, out, eps, hidden,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


def rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotary embedding of the heads of Q and K, in place; where norms are given, an RMSNorm of each head before it.

    qkv: [rows, (heads + 2 x kv_heads) x head_dim]. cos, sin: as in `DecoderShape`. q_norm, k_norm: [head_dim].
    """
    half = cos.shape[1] // 2
    _rotate[(qkv.shape[0], num_heads + num_kv_heads)](
        qkv, positions, cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, eps,
        num_heads, qkv.stride(0),
        HAS_NORM=q_norm is not None, HALF=half, HALF_PAD=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip


def write_kv(
    qkv: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor, kv: torch.Tensor, num_heads: int
) -> None:
    """Copy the rows' K and V to their places in one layer's cache.

    qkv: [rows, (heads + 2 x kv_heads) x head_dim]. kv: [blocks, 2, block_size, kv_heads, head_dim].
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    size = kv_heads * head_dim
    _write_kv[(qkv.shape[0], 2)](
        qkv, positions, block_tables, kv, num_heads * head_dim,
        qkv.stride(0), block_tables.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
        BLOCK_SIZE=block_size, SIZE=size, SIZE_PAD=triton.next_power_of_2(size), num_warps=min(max(size // 256, 1), 8),
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up. gate_up: [rows, 2 x intermediate], gate first. Returns [rows, intermediate]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, 1024))](gate_up, out, size, gate_up.stride(0), BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, hidden, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # Asked for first: it depends on nothing, and arrives while the sum is made.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        # The next layer adds to what is stored, so the norm is taken of that.
        stored = total.to(residual.dtype.element_ty)
        tl.store(residual + start + column, stored, mask=inside)
        total = stored.to(tl.float32)
    mean_square = tl.sum(total * total) / hidden
    tl.store(out + start + column, total * tl.rsqrt(mean_square + eps) * scale, mask=inside)


@triton.jit
def _rotate(
    qkv, positions, cos, sin, q_norm, k_norm, eps, num_heads, row_stride,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, HALF_PAD)
    inside = dim < HALF
    low = qkv + row * row_stride + head * (2 * HALF) + dim
    turned = tl.load(positions + row) * (2 * HALF) + dim
    a = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
        if head < num_heads:
            scale_a = tl.load(q_norm + dim, mask=inside, other=0.0).to(tl.float32)
            scale_b = tl.load(q_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)
        else:
            scale_a = tl.load(k_norm + dim, mask=inside, other=0.0).to(tl.float32)
            scale_b = tl.load(k_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)
        a = (a * factor * scale_a).to(qkv.dtype.element_ty).to(tl.float32)
        b = (b * factor * scale_b).to(qkv.dtype.element_ty).to(tl.float32)
    cos_a = tl.load(cos + turned, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + turned + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + turned, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + turned + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(low, a * cos_a + b * sin_a, mask=inside)
    tl.store(low + HALF, b * cos_b + a * sin_b, mask=inside)


@triton.jit
def _write_kv(
    qkv, positions, block_tables, kv, first, row_stride, table_stride, kv_block, kv_half, kv_token,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)  # 0: K, 1: V
    element = tl.arange(0, SIZE_PAD)
    inside = element < SIZE
    values = tl.load(qkv + row * row_stride + first + half * SIZE + element, mask=inside)
    position = tl.load(positions + row)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    place = kv + block * kv_block + half * kv_half + (position % BLOCK_SIZE) * kv_token
    tl.store(place + element, values, mask=inside)


@triton.jit
def _silu_mul(gate_up, out, size, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, activated * up, mask=inside)
