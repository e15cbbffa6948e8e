"""Sampling over ranks that each have a part of the vocabulary: each offers candidates, and all choose the same one.

Noise depends on seed, position and token alone, so the best of a part's noisy logits can be found there, and the best
of those is the token. Rows that filter need more: the part's `count` largest logits, and how much weight the part has.
What min-p, top-k and top-p keep is exact where it lies among those; a wider nucleus ends with them.

An offer, int32 [rows, width]: the best value (as its bits) and its token; with `count` > 0 also the largest logit and
the sum of exp(logit - largest), both as bits, then `count` values as bits, largest first, and their tokens. Logits are
penalised and scaled. What is missing is -inf.
"""

from __future__ import annotations

import torch

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.philox import gumbel, uniform_at, uniform_rows
from stepgraph.ops.sampling.reference import _LARGEST, GREEDY_BELOW, _argmax

_NO_TOKEN = 2**31 - 1
MINUS_INFINITY = -(1 << 23)  # the bits of float32's


def offer_width(count: int) -> int:
    """int32 numbers of a row's offer."""
    return 2 if count == 0 else 4 + 2 * count


def offer_count(width: int) -> int:
    """Candidates of a row's offer."""
    return max(width - 4, 0) // 2


def asks_filters(
    temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor | None, vocab: int
) -> torch.Tensor:
    """bool [rows]: rows that draw among some of the tokens only."""
    some = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    if min_p is not None:
        some = some | (min_p > 0)
    return (temperature >= GREEDY_BELOW) & some


def offer_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    first: int,
    vocab: int,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> None:
    """A part's offer, in plain torch; reads on the host which rows want noise.

    logits: [rows, n], of the tokens from `first` on. penalties: with the part's columns of `seen`. out: the offer. The
    other arguments are those of `sample`.
    """
    x = scaled_logits(logits, temperature, penalties)
    offer_candidates(x, out, first)
    filtered = asks_filters(temperature, top_k, top_p, min_p, vocab)
    noisy = ((temperature >= GREEDY_BELOW) & ~filtered).nonzero()[:, 0]
    if len(noisy):
        x[noisy] += gumbel(uniform_rows(seed[noisy], position[noisy], x.shape[1], first))
    best = _argmax(x)
    out[:, 0] = x.gather(1, best[:, None])[:, 0].view(torch.int32)
    out[:, 1] = best + first


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor, penalties: Penalties | None) -> torch.Tensor:
    """Penalised, over the temperature where a row draws: float32, finite or -inf."""
    x = logits.float() if penalties is None else penalties.apply(logits)
    divisor = torch.where(temperature >= GREEDY_BELOW, temperature, 1.0)
    return (x / divisor[:, None]).nan_to_num_(float("-inf"), _LARGEST, float("-inf"))


def offer_candidates(x: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """The part of an offer that filters need, of scaled logits. Can be captured."""
    count = offer_count(out.shape[1])
    if not count:
        return
    values, tokens = x.topk(min(count, x.shape[1]))
    top = values[:, :1]
    mass = torch.where(top > float("-inf"), (x - top).exp_().sum(-1, keepdim=True), 0.0)
    there = values.shape[1]
    out[:, 2:3], out[:, 3:4] = top.view(torch.int32), mass.view(torch.int32)
    floats = out[:, 4 : 4 + count].fill_(MINUS_INFINITY)
    floats[:, :there] = values.contiguous().view(torch.int32)
    out[:, 4 + count :].fill_(_NO_TOKEN)[:, :there] = (tokens + first).int()


def choose_token(
    offers: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    vocab: int,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> None:
    """The token of each row, from the offers of all parts, [parts, rows, width] in the order of their tokens.

    out: int64 [rows]. penalties: with `seen` of the whole vocabulary, which takes note of the tokens. Can be captured.
    The same offers give the same tokens on every rank.
    """
    best = offers[:, :, 0].contiguous().view(torch.float32)
    part = best.argmax(0, keepdim=True)  # the first of equals, so the lowest token
    out.copy_(offers[:, :, 1].gather(0, part)[0])
    if offers.shape[2] > 2:
        drawn = _filtered(offers, temperature, top_k, top_p, seed, position, vocab, min_p)
        out.copy_(torch.where(asks_filters(temperature, top_k, top_p, min_p, vocab), drawn, out))
    if penalties is not None:
        penalties.note(out)


def _filtered(
    offers: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab: int,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """int64 [rows]: drawn among the candidates that the filters keep."""
    parts, rows, width = offers.shape
    count = offer_count(width)
    tops, masses = (offers[:, :, column].contiguous().view(torch.float32) for column in (2, 3))
    values = offers[:, :, 4 : 4 + count].contiguous().view(torch.float32)
    floor = values[:, :, -1].amax(0)  # below it some part may have tokens that it does not offer
    x = values.transpose(0, 1).reshape(rows, parts * count)
    tokens = offers[:, :, 4 + count :].transpose(0, 1).reshape(rows, parts * count).long()
    tokens, order = tokens.sort(-1)
    x, order = x.gather(1, order).sort(stable=True, dim=-1, descending=True)  # equals: the lowest token first
    tokens = tokens.gather(1, order)
    top = x[:, :1]
    kept = (x >= floor[:, None]) & (x > float("-inf"))
    total = torch.where(masses > 0, masses * (tops - top[:, 0]).exp(), 0.0).sum(0)
    if min_p is not None:
        asked = min_p > 0
        kept &= ~asked[:, None] | (x >= top + min_p.clamp(min=1e-38).log().clamp(max=0.0)[:, None])
    by_count = (top_k > 0) & (top_k < vocab)
    last = top_k.long().clamp(1, parts * count) - 1
    kept &= ~by_count[:, None] | (x >= x.gather(1, last[:, None]))
    weights = torch.where(kept, (x - top).exp(), 0.0).double()
    mass = weights.cumsum(-1)
    some = by_count if min_p is None else by_count | (min_p > 0)
    wanted = torch.where(some, mass[:, -1], total.double()) * top_p
    last = (mass < wanted[:, None]).sum(-1).clamp(max=parts * count - 1)
    kept &= ~(top_p < 1)[:, None] | (x >= x.gather(1, last[:, None]))
    kept[:, 0] = True  # at least one, whatever top_p is
    spread = (rows, parts * count)
    noise = gumbel(uniform_at(seed[:, None].expand(spread), position[:, None].expand(spread), tokens))
    scores = torch.where(kept, x + noise, float("-inf"))
    best = scores.amax(-1, keepdim=True)
    return torch.where(scores == best, tokens, _NO_TOKEN).amin(-1)
