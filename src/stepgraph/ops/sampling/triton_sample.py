"""Sampling on a GPU: one program per row, thresholds found by bisection, no sort and no scratch memory.

A row that asks for nothing but the largest logit leaves after one pass over it.
"""

import torch
import triton
import triton.language as tl

from stepgraph.ops.sampling.reference import GREEDY_BELOW

_BLOCK = 4096
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_INT_MIN = tl.constexpr(-(2**31))
_INT_MAX = tl.constexpr(2**31 - 1)


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`sample` for CUDA tensors; see there. Launches one kernel and reads nothing on the host."""
    rows, vocab = logits.shape
    if rows:
        _sample[(rows,)](
            logits, temperature, top_k, top_p, seed, position, out, vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=8
        )


@triton.jit
def _load(row_ptr, tokens, vocab, temperature):
    """Scaled logits as `reference._scaled` has them; -inf past the vocabulary."""
    x = tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, _LARGEST)


@triton.jit
def _key(x):
    """int32 keys in the order of the floats, with one zero."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _uniform(seed, position, start, BLOCK: tl.constexpr):
    """`philox.uniform_rows` for the tokens from `start`, a multiple of 4, on."""
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, low, high, zero)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def _gumbel(u):
    """Standard Gumbel noise. `log1p` by its series where 1 - u would lose the digits of u."""
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def _mass_from(row_ptr, vocab, temperature, top, key, BLOCK: tl.constexpr):
    """The weight, exp(x - top), of all tokens whose key is at least `key`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = _load(row_ptr, tokens, vocab, temperature)
        mass += tl.where((_key(x) >= key) & (tokens < vocab), tl.exp(x - top), 0.0)
    return tl.sum(mass)


@triton.jit
def _threshold(row_ptr, vocab, temperature, top, low, high, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the tokens from it upwards reach `wanted`, in weight or in number.

    Both ends are keys of tokens, and `low` reaches it. Each pass halves the interval, then moves its end to the next
    key that a token has, so that it ends after about log2(tokens between the ends) passes, at most 32.
    """
    while low < high:
        middle = (low + ((high - low + 1) >> 1)).to(tl.int32)
        reached = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], _INT_MAX, tl.int32)
        below = tl.full([BLOCK], _INT_MIN, tl.int32)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = _load(row_ptr, tokens, vocab, temperature)
            key = _key(x)
            inside = tokens < vocab
            upper = (key >= middle) & inside
            if BY_MASS:
                reached += tl.where(upper, tl.exp(x - top), 0.0)
            else:
                reached += tl.where(upper, 1.0, 0.0)
            above = tl.minimum(above, tl.where(upper, key, _INT_MAX))
            below = tl.maximum(below, tl.where(inside & (key < middle), key, _INT_MIN))
        if tl.sum(reached) >= wanted:
            low = tl.minimum(tl.min(above).to(tl.int64), high)
        else:
            high = tl.maximum(tl.max(below).to(tl.int64), low)
    return low


@triton.jit
def _sample(logits, temperatures, top_ks, top_ps, seeds, positions, out, vocab, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits + row * row_stride
    asked = tl.load(temperatures + row)
    temperature = tl.where(asked >= _GREEDY_BELOW, asked, 1.0)  # also where it is NaN

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    lowest = tl.full([BLOCK], _INT_MAX, tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = _load(row_ptr, tokens, vocab, temperature)
        index = tl.where(x > best, tokens, index)
        best = tl.maximum(best, x)
        lowest = tl.minimum(lowest, tl.where(tokens < vocab, _key(x), _INT_MAX))
    top = tl.max(best)
    token = tl.min(tl.where(best == top, index, _INT_MAX))

    if (asked >= _GREEDY_BELOW) & (top > float("-inf")):
        high = _key(top).to(tl.int64)
        low = tl.min(lowest).to(tl.int64)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab):
            low = _threshold(row_ptr, vocab, temperature, top, low, high, top_k.to(tl.float32), False, BLOCK)
        top_p = tl.load(top_ps + row)
        if top_p < 1:
            wanted = top_p * _mass_from(row_ptr, vocab, temperature, top, low.to(tl.int32), BLOCK)
            low = _threshold(row_ptr, vocab, temperature, top, low, high, wanted, True, BLOCK)

        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        threshold = low.to(tl.int32)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = _load(row_ptr, tokens, vocab, temperature)
            kept = (_key(x) >= threshold) & (tokens < vocab)
            if tl.max(kept.to(tl.int32)) > 0:
                noise = _gumbel(_uniform(seed, position, start, BLOCK))
                score = tl.where(kept, x + noise, float("-inf"))
                index = tl.where(score > best, tokens, index)
                best = tl.maximum(best, score)
        token = tl.min(tl.where(best == tl.max(best), index, _INT_MAX))
    tl.store(out + row, token.to(tl.int64))
