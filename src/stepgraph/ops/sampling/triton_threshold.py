"""Where top-k and top-p cut: by bisection over the keys of a row, or of the few tokens that still matter."""

import triton
import triton.language as tl

from stepgraph.ops.sampling.triton_rows import INT_MAX, INT_MIN, key_of, scaled, weight_of


@triton.jit
def read(source, listed_x, floor, start, size, LISTED: tl.constexpr, PENALTIES: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK scaled logits from `start` on, -inf past the end and below `floor`.

    LISTED: from a list of `size` of them, which lie above `floor` already. Otherwise from the row itself.
    """
    places = start + tl.arange(0, BLOCK)
    if LISTED:
        x = tl.load(listed_x + places, mask=places < size, other=float("-inf"))
    else:
        x = scaled(source, places, PENALTIES)
        x = tl.where(x >= floor, x, float("-inf"))
    return x


@triton.jit
def mass_from(
    source, listed_x, floor, size, least, top,
    LISTED: tl.constexpr, PENALTIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of all tokens whose key is at least `least`."""
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        x = read(source, listed_x, floor, start, size, LISTED, PENALTIES, BLOCK)
        mass += tl.where(key_of(x) >= least, weight_of(x, top), 0)
    return tl.sum(mass)


@triton.jit
def threshold(
    source, listed_x, floor, size, least, top, wanted,
    BY_MASS: tl.constexpr, LISTED: tl.constexpr, PENALTIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens from it upwards reach `wanted`, in weight or in number; `least` if none.

    Each pass halves the interval, then moves its end to the next key that a token has, so that it ends after about
    log2(tokens between the ends) passes, at most 32. least: int64, what lies below it does not count.
    """
    low = least
    high = key_of(top).to(tl.int64)
    while low < high:
        middle = (low + ((high - low + 1) >> 1)).to(tl.int32)
        reached = tl.zeros([BLOCK], tl.int64)
        above = tl.full([BLOCK], INT_MAX, tl.int32)
        below = tl.full([BLOCK], INT_MIN, tl.int32)
        for start in range(0, size, BLOCK):
            x = read(source, listed_x, floor, start, size, LISTED, PENALTIES, BLOCK)
            key = key_of(x)
            inside = (x > float("-inf")) & (key >= least)
            upper = inside & (key >= middle)
            if BY_MASS:
                reached += tl.where(upper, weight_of(x, top), 0)
            else:
                reached += upper.to(tl.int64)
            above = tl.minimum(above, tl.where(upper, key, INT_MAX))
            below = tl.maximum(below, tl.where(inside & (key < middle), key, INT_MIN))
        if tl.sum(reached) >= wanted:
            low = tl.minimum(tl.min(above).to(tl.int64), high)
        else:
            high = tl.maximum(tl.max(below).to(tl.int64), low)
    return low
