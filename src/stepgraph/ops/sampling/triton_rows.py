"""What the sampling kernels share: a row's settings and logits, keys in the order of the floats, weights, noise.

Every value here is computed by the same instructions wherever it is needed, so that kernels agree on it to the bit;
`enable_fp_fusion=False` at each launch keeps a compiler from joining them differently.
"""

import torch
import triton
import triton.language as tl

from stepgraph.ops.sampling.reference import GREEDY_BELOW

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_WEIGHT_ONE = tl.constexpr(2.0**42)  # sums stay inside int64 for vocabularies below 2**21
INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def asked(row, vocab, temperatures, top_ks, top_ps, min_ps):
    """(temperature, draws, by_count, by_mass, filtered): a greedy row has temperature 1 and nothing else."""
    temperature = tl.load(temperatures + row)
    draws = temperature >= _GREEDY_BELOW  # not where it is NaN
    top_k = tl.load(top_ks + row)
    by_count = draws & (top_k > 0) & (top_k < vocab)
    by_mass = draws & (tl.load(top_ps + row) < 1)
    filtered = by_count | by_mass | (draws & (tl.load(min_ps + row) > 0))
    return tl.where(draws, temperature, 1.0), draws, by_count, by_mass, filtered


@triton.jit
def penalised(row, repetitions, presences, frequencies):
    """Whether the row asks for a penalty."""
    return (tl.load(repetitions + row) != 1) | (tl.load(presences + row) != 0) | (tl.load(frequencies + row) != 0)


@triton.jit
def source_of(row, logits, row_stride, size, temperature, seen, seen_stride, repetitions, presences, frequencies):
    """What `scaled` reads a row's logits from. size: of a row."""
    mine, seen_here = logits + row * row_stride, seen + row * seen_stride
    return mine, size, temperature, row, seen_here, repetitions, presences, frequencies


@triton.jit
def scaled(source, tokens, PENALTIES: tl.constexpr):
    """Logits as `reference` scales them, -inf from `size` on. source: as of `source_of`."""
    logits, size, temperature, row, seen, repetitions, presences, frequencies = source
    inside = tokens < size
    x = tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if PENALTIES:  # noqa: SIM102 (the first is decided when it compiles)
        if penalised(row, repetitions, presences, frequencies):
            known = tl.load(seen + tokens, mask=inside, other=0)
            factor = tl.where(known > 0, tl.load(repetitions + row), 1.0)
            x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
            count = known >> 1
            x = x - tl.load(frequencies + row) * count.to(tl.float32)
            x = x - tl.where(count > 0, tl.load(presences + row), 0.0)
    return divided(x, temperature)


@triton.jit
def note(seen, token, row, repetitions, presences, frequencies):
    """Count a token that was chosen, where penalties need it. seen: of the row."""
    if penalised(row, repetitions, presences, frequencies):
        tl.store(seen + token, tl.load(seen + token) + 2)


@triton.jit
def divided(x, temperature):
    """x / temperature, finite or -inf: NaN counts as -inf, +inf as the largest number."""
    x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return tl.minimum(tl.where(x != x, float("-inf"), x), _LARGEST)


@triton.jit
def lowest_kept(top, min_p):
    """What a scaled logit must reach for min_p; -inf where that is off."""
    return tl.where(min_p > 0, tl.minimum(top + tl.log(min_p), top), float("-inf"))


@triton.jit
def key_of(x):
    """int32 keys in the order of the floats, with one zero."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(x, top):
    """exp(x - top) in fixed point, int64: sums are exact, so neither their order nor the batch changes them."""
    return (tl.exp(x - top) * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def share_of(mass, top_p):
    """top_p x mass, as a sum of weights."""
    return (mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)


@triton.jit
def better_of(x, tokens, best, index):
    """Lane by lane the larger value and its token; the earlier one of equals."""
    return tl.maximum(best, x), tl.where(x > best, tokens, index)


@triton.jit
def winner(best, index):
    """The largest of the lanes and its token, the lowest of equals."""
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, index, INT_MAX))


@triton.jit
def uniform_from(seed, position, start, BLOCK: tl.constexpr):
    """`philox.uniform_rows` for the tokens from `start`, a multiple of 4, on."""
    block = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = _philox(seed, position, block)
    return _uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def uniform_at(seed, position, tokens):
    """`philox.uniform_at`: the same for tokens in any order."""
    w0, w1, w2, w3 = _philox(seed, position, tokens // 4)
    lane = tokens % 4
    return _uniform(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def gumbel(u):
    """Standard Gumbel noise. `log1p` by its series where 1 - u would lose the digits of u."""
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def _philox(seed, position, block):
    zero = tl.zeros_like(block).to(tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, block.to(tl.uint32), low, high, zero)


@triton.jit
def _uniform(word):
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
