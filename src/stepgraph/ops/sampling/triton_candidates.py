"""What rows that filter need of parts of a vocabulary: a part's largest logits in order, and the draw among all parts'.

A value and its token are one int64, so that a sort puts the largest value first, and of equals the lowest token.
"""

import triton
import triton.language as tl

from stepgraph.ops.sampling import shard
from stepgraph.ops.sampling.triton_rows import INT_MAX, gumbel, key_of, lowest_kept, uniform_at, winner

MINUS_INFINITY = tl.constexpr(shard.MINUS_INFINITY)


@triton.jit
def packed(x, tokens):
    """int64 in the order of the values, and of equals with the lowest token on top. tokens: int32, from 0 on."""
    return (key_of(x).to(tl.int64) << 32) | (~tokens & 0x7FFFFFFF).to(tl.int64)


@triton.jit
def value_of(pair):
    key = (pair >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(pair):
    return ~(pair & 0x7FFFFFFF).to(tl.int32) & 0x7FFFFFFF


@triton.jit
def best_of_block(x, tokens, COUNT: tl.constexpr):
    """The largest `COUNT` of a block as pairs, the largest, and the block's sum of exp(x - the largest)."""
    top = tl.max(x)
    return tl.topk(packed(x, tokens), COUNT), top, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0))


@triton.jit
def join_blocks(pairs, tops, masses, out, row, blocks, count, COUNT: tl.constexpr, LISTED: tl.constexpr):
    """Write an offer's candidates from those of its part's blocks; see `shard` for what is where."""
    listed, lanes = tl.arange(0, LISTED), tl.arange(0, COUNT)
    all_ = tl.load(pairs + row * blocks * COUNT + listed, mask=listed < blocks * COUNT, other=-(2**63))
    best = tl.topk(all_, COUNT)
    tl.store(out + 4 + lanes, value_of(best).to(tl.int32, bitcast=True), mask=lanes < count)
    tl.store(out + 4 + count + lanes, token_of(best), mask=lanes < count)
    block = tl.arange(0, LISTED // COUNT)
    inside = block < blocks
    top = tl.load(tops + row * blocks + block, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * blocks + block, mask=inside, other=0.0)
    whole = tl.max(top)
    tl.store(out + 2, whole.to(tl.int32, bitcast=True))
    share = tl.where(mass > 0, mass * tl.exp(top - whole), 0.0)
    tl.store(out + 3, tl.sum(share).to(tl.int32, bitcast=True))


@triton.jit
def no_candidates(out, count, COUNT: tl.constexpr):
    """An offer of a row that does not filter."""
    lanes = tl.arange(0, COUNT)
    tl.store(out + 4 + lanes, tl.full([COUNT], MINUS_INFINITY, tl.int32), mask=lanes < count)
    tl.store(out + 4 + count + lanes, tl.full([COUNT], INT_MAX, tl.int32), mask=lanes < count)
    tl.store(out + 2, MINUS_INFINITY)
    tl.store(out + 3, 0)


@triton.jit
def draw(
    offers, part_stride, parts, count, top_k, top_p, min_p, by_count, by_mass, seed, position,
    PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The token of a row that filters; see `shard.choose_token`. offers: the row's of the first part."""
    lanes, part = tl.arange(0, LANES), tl.arange(0, PARTS)
    at = offers + (lanes // count) * part_stride + 4 + lanes % count
    inside = lanes < parts * count
    values = tl.load(at, mask=inside, other=MINUS_INFINITY).to(tl.float32, bitcast=True)
    pairs = tl.sort(packed(values, tl.load(at + count, mask=inside, other=INT_MAX)), descending=True)
    x, tokens = value_of(pairs), token_of(pairs)
    top = tl.max(x)
    mine = offers + part * part_stride
    last = tl.load(mine + 3 + count, mask=part < parts, other=MINUS_INFINITY).to(tl.float32, bitcast=True)
    # Below the least that a part offers, it may have tokens that it does not offer.
    kept = (x >= tl.max(last)) & (x > float("-inf")) & (x >= lowest_kept(top, min_p))
    if by_count:
        kept = kept & (x >= tl.max(tl.where(lanes == tl.minimum(top_k, parts * count) - 1, x, float("-inf"))))
    if by_mass:
        mass = tl.cumsum(tl.where(kept, tl.exp(x - top), 0.0).to(tl.float64), 0)
        tops = tl.load(mine + 2, mask=part < parts, other=MINUS_INFINITY).to(tl.float32, bitcast=True)
        masses = tl.load(mine + 3, mask=part < parts, other=0).to(tl.float32, bitcast=True)
        whole = tl.sum(tl.where(masses > 0, masses * tl.exp(tops - top), 0.0)).to(tl.float64)
        wanted = tl.where(by_count | (min_p > 0), tl.max(mass), whole) * top_p.to(tl.float64)
        end = tl.minimum(tl.sum((mass < wanted).to(tl.int32)), parts * count - 1)
        kept = kept & (x >= tl.max(tl.where(lanes == end, x, float("-inf"))))
    kept = kept | (lanes == 0)  # at least one, whatever top_p is
    noisy = tl.where(kept, x + gumbel(uniform_at(seed, position, tokens)), float("-inf"))
    _, token = winner(noisy, tokens)
    return token
