"""A coarse histogram of a row, by distance from its largest logit, and where top-k and top-p fall in it.

Bins follow the order of the logits: the first seven eighths of them are of one width and reach as far as the row
does, at most 32 nats; the rest double in width every 16 bins, for rows that are spread out further.
"""

import triton
import triton.language as tl

from stepgraph.ops.sampling.triton_rows import share_of


@triton.jit
def span_of(top, lowest):
    """How far the bins of one width reach, in nats. lowest: the smallest finite logit."""
    return tl.minimum(tl.maximum(top - lowest, 0.0009765625), 32.0)


@triton.jit
def bin_of(x, top, span, BINS: tl.constexpr):
    """int32 in [0, BINS). Never falls as `x` falls, and equals share a bin."""
    TAIL: tl.constexpr = BINS // 8
    NEAR: tl.constexpr = BINS - TAIL
    away = top - x
    near = tl.minimum(away * (NEAR / span), NEAR - 1.0).to(tl.int32)
    # The exponent and four bits of the mantissa of away / span, which is 1 or more here.
    step = ((away * (1.0 / span)).to(tl.int32, bitcast=True) >> 19) - (127 << 4)
    far = NEAR + tl.minimum(tl.maximum(step, 0), TAIL - 1)
    return tl.where(away < span, near, far)


@triton.jit
def cuts(counts, masses, row, top_k, top_p, by_count, by_mass, BINS: tl.constexpr):
    """(edge, first, last, hidden count, hidden mass, mass above first) of a row's histogram.

    edge: the bin that top-k cuts through; BINS where it cuts nothing.
    first, last: the bins that top-p may cut through; which one depends on what top-k leaves of `edge`. BINS and -1
        where it is off.
    hidden: what lies above `edge`, but for the bins from `first` to `last`.

    So a bin before min(edge, first) is kept whole, and one that is neither `edge` nor from `first` to `last` is kept
    whole or not at all.
    """
    bins = tl.arange(0, BINS)
    edge = tl.full([], BINS, tl.int32)
    count = tl.zeros([BINS], tl.int32)
    if by_count:
        count = tl.load(counts + row * BINS + bins)
        edge = tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32))
    first = tl.full([], BINS, tl.int32)
    last = tl.full([], -1, tl.int32)
    mass = tl.zeros([BINS], tl.int64)
    if by_mass:
        mass = tl.load(masses + row * BINS + bins)
        reached = tl.cumsum(mass, 0)
        # Top-k leaves at least nothing and at most all of `edge`; top-p falls no lower than `edge` itself.
        least, most = tl.sum(tl.where(bins < edge, mass, 0)), tl.sum(tl.where(bins <= edge, mass, 0))
        first = tl.sum((reached < share_of(least, top_p)).to(tl.int32))
        last = tl.sum((reached < share_of(most, top_p)).to(tl.int32))
    hidden = (bins < edge) & ((bins < first) | (bins > last))
    hidden_count = tl.sum(tl.where(hidden, count, 0))
    hidden_mass = tl.sum(tl.where(hidden, mass, 0))
    above = tl.sum(tl.where(bins < first, mass, 0))
    return edge, first, last, hidden_count, hidden_mass, above


@triton.jit
def undecided(bins, edge, first, last):
    """Whether a bin's tokens must be looked at one by one."""
    return (bins == edge) | ((bins >= first) & (bins <= last))
