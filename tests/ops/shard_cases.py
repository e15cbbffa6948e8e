"""Sampling over parts of a vocabulary, put together in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import choose_token, offer_reference, offer_width


def batch(rows: int, vocab: int, *, seed: int = 0, filters: bool = True) -> dict[str, torch.Tensor]:
    """Every kind of row: greedy, drawn, and with each filter."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.arange(rows) % (6 if filters else 2)
    top_k = torch.where((kinds == 2) | (kinds == 4), 5, 0).int()
    top_p = torch.where((kinds == 3) | (kinds == 4), 0.6, 1.0)
    return {
        "logits": torch.randn(rows, vocab, generator=g) * 4,
        "temperature": torch.where(kinds == 0, 0.0, 0.7),
        "top_k": top_k,
        "top_p": top_p,
        "min_p": torch.where(kinds == 5, 0.2, 0.0),
        "seed": torch.randint(0, 2**62, (rows,), generator=g),
        "position": torch.randint(0, 5000, (rows,), generator=g),
    }


def penalties(rows: int, vocab: int) -> Penalties:
    g = torch.Generator().manual_seed(1)
    some = torch.arange(rows) % 3 == 0
    seen = torch.randint(0, 6, (rows, vocab), generator=g, dtype=torch.int32)
    return Penalties(torch.where(some, 1.3, 1.0), torch.where(some, 0.5, 0.0), torch.where(some, 0.25, 0.0), seen)


def tokens_of(
    cuts: list[int],
    given: dict[str, torch.Tensor],
    count: int,
    penalties: Penalties | None = None,
    offer: Callable[..., None] = offer_reference,
    choose: Callable[..., None] = choose_token,
) -> torch.Tensor:
    """The tokens that parts, cut at these places, choose together, and take note of."""
    given = dict(given)
    logits, min_p = given.pop("logits"), given.pop("min_p")
    rows, vocab = logits.shape
    offers = torch.empty(len(cuts) - 1, rows, offer_width(count), dtype=torch.int32, device=logits.device)
    for part, (start, stop) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        mine = None if penalties is None else penalties._replace(seen=penalties.seen[:, start:stop])
        offer(
            logits[:, start:stop].contiguous(), **given, out=offers[part], first=start, vocab=vocab, min_p=min_p,
            penalties=mine,
        )  # fmt: skip
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    choose(offers, **given, out=out, vocab=vocab, min_p=min_p, penalties=penalties)
    return out
