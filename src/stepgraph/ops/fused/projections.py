"""The four projections of a layer and the last one, each one launch with all that surrounds it.

Every program of every kernel waits for the kernel in front before it reads what that one writes, and before it writes
anything. So when a kernel ends, all in front of it have ended, and what they read may be overwritten. Positions and
weights are read before the wait: no kernel between two starts of a step writes those.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.fused.project import first_scale, first_tile, project


@triton.jit(do_not_specialize=["rows"])
def norm_qkv_rope_write(
    x, norm_weight, weight, bias, positions, block_tables, cos, sin, q, kv, eps, rows,
    x_stride, table_stride, kv_block, kv_half, kv_token,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (pairs of a head in tiles, heads of Q, K and V). A program has both halves of its pairs, side by side."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    PAIRS: tl.constexpr = OUTPUTS // 2
    output, pair = tl.arange(0, OUTPUTS), tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    # Outputs past the head's end repeat the last pair.
    low = tl.minimum(tl.program_id(0) * PAIRS + output // 2, HALF - 1)
    outputs = head * (2 * HALF) + low + (output % 2) * HALF
    w = first_tile(weight, outputs, K, TILE)
    scale = first_scale(norm_weight, K, TILE)
    row = tl.arange(0, PADDED)
    real = row < rows
    position = tl.load(positions + row, mask=real, other=0)
    if HAS_BIAS:
        added = tl.load(bias + outputs).to(tl.float32)
    if PDL:
        gdc_wait()
    # What depends on the position would hold up the weights in front of the wait, and is needed last.
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    inside = real[:, None] & (pair < HALF)[None, :]
    angle = position[:, None] * (2 * HALF) + pair[None, :]
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    result = project(x, x_stride, rows, norm_weight, scale, eps, weight, w, outputs, K, TILE, PADDED, True, OUTPUTS)
    if HAS_BIAS:
        result += added[None, :]
    a, b = tl.split(tl.reshape(result, [PADDED, PAIRS, 2]))
    if head < NUM_HEADS + KV_HEADS:
        a, b = a * cos_low + b * sin_low, b * cos_high + a * sin_high
    if head < NUM_HEADS:
        place = q + (row[:, None] * NUM_HEADS + head) * (2 * HALF) + pair[None, :]
    else:
        number = head - NUM_HEADS
        start = (number // KV_HEADS) * kv_half + (number % KV_HEADS) * (2 * HALF)
        place = kv + (block * kv_block + (position % BLOCK_SIZE) * kv_token)[:, None] + (start + pair)[None, :]
    tl.store(place, a, mask=inside)
    tl.store(place + HALF, b, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def linear(
    x, norm_weight, weight, bias, out, eps, rows, size, x_stride, out_stride,
    K: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = norm(x) W^T + bias, or with ADD out += that. Only the program that writes an element of `out` reads it."""
    if PDL:
        gdc_launch_dependents()
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs = tl.minimum(column, size - 1)
    w = first_tile(weight, outputs, K, TILE)
    scale = first_scale(norm_weight, K, TILE) if NORM else 0.0
    if HAS_BIAS:
        added = tl.load(bias + outputs).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if ADD:
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    result = project(x, x_stride, rows, norm_weight, scale, eps, weight, w, outputs, K, TILE, PADDED, NORM, OUTPUTS)
    if HAS_BIAS:
        result += added[None, :]
    if ADD:
        result += before
    tl.store(place, result, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_gate_up_swiglu(
    x, norm_weight, weight, out, eps, rows, size, x_stride, out_stride,
    K: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, size] = silu(gate) x up of norm(x). A program has gate and up of its columns, side by side."""
    if PDL:
        gdc_launch_dependents()
    COLUMNS: tl.constexpr = OUTPUTS // 2
    first = tl.program_id(0) * COLUMNS
    output = tl.arange(0, OUTPUTS)
    outputs = tl.minimum(first + output // 2, size - 1) + (output % 2) * size
    w = first_tile(weight, outputs, K, TILE)
    scale = first_scale(norm_weight, K, TILE)
    if PDL:
        gdc_wait()
    result = project(x, x_stride, rows, norm_weight, scale, eps, weight, w, outputs, K, TILE, PADDED, True, OUTPUTS)
    gate, up = tl.split(tl.reshape(result, [PADDED, COLUMNS, 2]))
    row, column = tl.arange(0, PADDED), first + tl.arange(0, COLUMNS)
    place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, gate * tl.sigmoid(gate) * up, mask=(row < rows)[:, None] & (column < size)[None, :])
