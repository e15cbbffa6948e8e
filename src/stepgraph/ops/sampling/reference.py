"""Sampling in plain torch: the truth in tests, and what runs on the CPU. Works only for what each row asks."""

from math import gcd

import torch

from stepgraph.ops.sampling.philox import gumbel, uniform_at, uniform_rows

GREEDY_BELOW = 2.0**-17
"""Temperatures under this are greedy: dividing by them would overflow and make ties of different logits."""

_LARGEST = torch.finfo(torch.float32).max
_NOISE_ROWS = 16  # rows whose noise is computed together: bounds the scratch to some 10 MiB for 50,000 tokens


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`sample` without the custom operator; see there."""
    vocab = logits.shape[1]
    asked = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True))
    noisy = [row for row, (t, _, _) in enumerate(asked) if t >= GREEDY_BELOW]
    filtered = [row for row in noisy if 0 < asked[row][1] < vocab or asked[row][2] < 1]
    plain = sorted(set(noisy) - set(filtered))
    if len(noisy) < len(asked):
        out.copy_(_argmax(logits))
    for start in range(0, len(plain), _NOISE_ROWS):
        rows = torch.tensor(plain[start : start + _NOISE_ROWS], device=logits.device)
        scores = gumbel(uniform_rows(seed[rows], position[rows], vocab)).add_(_scaled(logits[rows], temperature[rows]))
        out[rows] = _argmax(scores)
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        scaled = _scaled(logits[rows], temperature[rows])
        kept = [_kept(scaled[i], *asked[row][1:]) for i, row in enumerate(filtered)]
        out[rows] = _draw(scaled, kept, seed[rows], position[rows])


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature as float32, finite or -inf: NaN counts as -inf, +inf as the largest number."""
    return (logits.float() / temperature[:, None]).nan_to_num_(float("-inf"), _LARGEST, float("-inf"))


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """Per row the lowest index of the largest value that is not NaN; 0 where there is none.

    `amax` is vectorised on the CPU and `argmax` is not: find the tile first, then the place in it.
    """
    tile = gcd(x.shape[1], 512)
    if tile < 16:
        best = x.argmax(-1)
    else:
        tiles = x.unflatten(1, (-1, tile))
        first = tiles.amax(-1).argmax(-1)
        inside = tiles[torch.arange(x.shape[0], device=x.device), first].argmax(-1)
        best = first * tile + inside
    if x.gather(1, best[:, None]).isnan().any():
        return x.nan_to_num(float("-inf"), float("inf"), float("-inf")).argmax(-1)
    return best


def _kept(x: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Token ids, ascending, that top-k and then top-p leave of one row of scaled logits."""
    if not 0 < top_k < len(x):
        return _nucleus(x, top_p)
    tokens = _largest(x, top_k)
    return tokens[_nucleus(x[tokens], top_p)] if top_p < 1 else tokens


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values and their equals."""
    tiles = x.unflatten(0, (-1, gcd(len(x), 128))).amax(-1)
    if k < len(tiles):  # k tiles hold a value that reaches this one, so no smaller value counts
        near = (x >= tiles.topk(k).values[-1]).nonzero()[:, 0]
    else:
        near = torch.arange(len(x), device=x.device)
    values = x[near]
    return near[values >= values.topk(k).values[-1]]


def _nucleus(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the fewest largest values whose share of the softmax reaches top_p, and their equals."""
    weights = (x - x.amax()).exp_()
    total = weights.sum()
    # What weighs less than half an even share of 1 - top_p weighs less than that together: it needs no sorting.
    heavy = (weights >= total * ((1 - max(top_p, 0.0)) / 2 / len(x))).nonzero()[:, 0]
    if not len(heavy):  # no finite logit at all
        return torch.zeros(1, dtype=torch.int64, device=x.device)
    mass, order = weights[heavy].sort(descending=True)
    last = int((mass.cumsum(0, dtype=torch.float64) < top_p * total).sum())
    values = x[heavy]
    return heavy[values >= values[order[min(last, len(order) - 1)]]]


def _draw(scaled: torch.Tensor, kept: list[torch.Tensor], seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Gumbel-max over the kept tokens of each row, the noise of all rows in one go."""
    counts = torch.tensor([len(tokens) for tokens in kept], device=scaled.device)
    tokens = torch.cat(kept)
    row = torch.arange(len(kept), device=scaled.device).repeat_interleave(counts)
    scores = gumbel(uniform_at(seed[row], position[row], tokens)).add_(scaled[row, tokens])
    best = [int(part.argmax()) for part in scores.split(counts.tolist())]
    return torch.stack([ids[i] for ids, i in zip(kept, best, strict=True)])
