"""What all fused projections share: some rows of a weight matrix times the step's rows, each weight read once.

A kernel asks for its first tile of weights, waits for the kernel in front, and then goes through the rest: weights
depend on nothing, so that they arrive while that kernel ends. An RMSNorm in front of a projection costs no launch: its
weight is multiplied into the rows as they are read, their squares are summed beside, and the result is scaled.

One row is multiplied on the ordinary units and summed over the threads once, at the end. More rows are padded to 16 or
a larger power of two and multiplied on tensor cores.
"""

import triton
import triton.language as tl


@triton.jit
def first_tile(weight, outputs, K: tl.constexpr, TILE: tl.constexpr):
    """The first TILE columns of the rows `outputs` of a weight [.., K]: [outputs, TILE]."""
    return _weights(weight, outputs, 0, K, TILE)


@triton.jit
def first_scale(norm_weight, K: tl.constexpr, TILE: tl.constexpr):
    """The first TILE weights of a norm over K columns."""
    return _vector(norm_weight, 0, K, TILE)


@triton.jit
def project(
    x, x_stride, rows, norm_weight, scale, eps, weight, w, outputs,
    K: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """x [rows, K] times the rows `outputs` of a weight, float32 [PADDED, OUTPUTS]. PADDED: 1, or 16 or more.

    w, scale: the first tiles, read before. With NORM, of x's RMSNorm; without, scale is not looked at.
    """
    if PADDED == 1:
        total = tl.zeros([OUTPUTS, TILE], tl.float32)
        squares = tl.zeros([TILE], tl.float32)
        total, squares = _add_row(total, squares, w, x, scale, 0, K, TILE, NORM)
        for start in range(TILE, K, TILE):
            w = _weights(weight, outputs, start, K, TILE)
            if NORM:
                scale = _vector(norm_weight, start, K, TILE)
            total, squares = _add_row(total, squares, w, x, scale, start, K, TILE, NORM)
        result = tl.sum(total, 1)[None, :]
        if NORM:
            result *= tl.rsqrt(tl.sum(squares) / K + eps)
    else:
        result = tl.zeros([PADDED, OUTPUTS], tl.float32)
        sums = tl.zeros([PADDED], tl.float32)
        result, sums = _add_rows(result, sums, w, x, x_stride, rows, scale, 0, K, TILE, PADDED, NORM)
        for start in range(TILE, K, TILE):
            w = _weights(weight, outputs, start, K, TILE)
            if NORM:
                scale = _vector(norm_weight, start, K, TILE)
            result, sums = _add_rows(result, sums, w, x, x_stride, rows, scale, start, K, TILE, PADDED, NORM)
        if NORM:
            result *= tl.rsqrt(sums / K + eps)[:, None]
    return result


@triton.jit
def _add_row(total, squares, w, x, scale, start, K: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr):
    values = _vector(x, start, K, TILE).to(tl.float32)
    if NORM:
        squares += values * values
        values *= scale.to(tl.float32)
    return total + w.to(tl.float32) * values[None, :], squares


@triton.jit
def _add_rows(
    result, sums, w, x, x_stride, rows, scale, start,
    K: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, PADDED), start + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    if NORM:
        raised = values.to(tl.float32)
        sums += tl.sum(raised * raised, 1)
        raised *= scale.to(tl.float32)[None, :]
        if x.dtype.element_ty == tl.float16:  # not scaled yet, so that it may be past what the type holds
            raised = tl.minimum(tl.maximum(raised, -65504.0), 65504.0)
        values = raised.to(values.dtype)
    return tl.dot(values, tl.trans(w), result, input_precision="ieee"), sums


@triton.jit
def _weights(weight, outputs, start, K: tl.constexpr, TILE: tl.constexpr):
    column = start + tl.arange(0, TILE)
    # Read once and by nobody else: they need not push the rows out of the cache.
    where = weight + outputs.to(tl.int64)[:, None] * K + column[None, :]
    if K % TILE:
        return tl.load(where, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(where, eviction_policy="evict_first")


@triton.jit
def _vector(x, start, K: tl.constexpr, TILE: tl.constexpr):
    column = start + tl.arange(0, TILE)
    if K % TILE:
        return tl.load(x + column, mask=column < K, other=0.0)
    else:
        return tl.load(x + column)
