"""Sampling in plain torch: the truth in tests, and what runs on the CPU. Works only for what each row asks."""

from math import gcd

import torch

from stepgraph.ops.sampling.philox import gumbel, uniform_at, uniform_rows

GREEDY_BELOW = 2.0**-17
"""Temperatures under this are greedy: dividing by them would overflow and make ties of different logits."""

_LARGEST = torch.finfo(torch.float32).max
_NOISE_ROWS = 4  # whole rows of noise made together: few enough for the scratch to stay in the caches
_LAYERS_PER_NAT = 8


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
    vocab, device = logits.shape[1], logits.device
    asked = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True))
    noisy = [row for row, (t, _, _) in enumerate(asked) if t >= GREEDY_BELOW]
    filtered = [row for row in noisy if 0 < asked[row][1] < vocab or asked[row][2] < 1]
    plain = sorted(set(noisy) - set(filtered))
    if len(noisy) < len(asked):
        out.copy_(_argmax(logits))
    for start in range(0, len(plain), _NOISE_ROWS):
        rows = torch.tensor(plain[start : start + _NOISE_ROWS], device=device)
        noise = gumbel(uniform_rows(seed[rows], position[rows], vocab))
        out[rows] = _argmax(noise.add_(_scaled(logits[rows], temperature[rows, None])))
    if filtered:
        rows = torch.tensor(filtered, device=device)
        kept = [_kept(_scaled(logits[row], temperature[row]), *asked[row][1:]) for row in filtered]
        out[rows] = _draw(kept, seed[rows], position[rows])


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature as float32, finite or -inf: NaN counts as -inf, +inf as the largest number."""
    return (logits.float() / temperature).nan_to_num_(float("-inf"), _LARGEST, float("-inf"))


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


def _kept(x: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k and then top-p leave of one row of scaled logits: token ids, ascending, and their values."""
    if not 0 < top_k < len(x):
        tokens = _nucleus(x, top_p)
        return tokens, x[tokens]
    tokens = _largest(x, top_k)
    values = x[tokens]
    if not top_p < 1:
        return tokens, values
    inner = _nucleus(values, top_p)
    return tokens[inner], values[inner]


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values and of their equals."""
    tiles = x.unflatten(0, (-1, gcd(len(x), 128))).amax(-1)
    # k tiles hold a value that reaches this one, so what is smaller need not be looked at.
    floor = tiles.topk(k).values[-1] if k < len(tiles) else x.amin()
    near = (x >= floor).nonzero()[:, 0]
    values = x[near]
    return near[values >= values.topk(k).values[-1]]


def _nucleus(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the fewest largest values whose share of the softmax reaches top_p, and of their equals.

    Sorts only the layer of values, an eighth wide, in which the share is reached.
    """
    top = x.amax()
    weights = (x - top).exp_()
    total = weights.sum()
    # What weighs less than half an even share of 1 - top_p weighs less than that together, so it is never needed.
    heavy = (weights >= total * ((1 - max(top_p, 0.0)) / 2 / len(x))).nonzero()[:, 0]
    if not len(heavy):  # no finite logit at all
        return torch.zeros(1, dtype=torch.int64, device=x.device)
    values, weights = x[heavy], weights[heavy].double()
    layer = ((top - values) * _LAYERS_PER_NAT).long()
    mass = layer.bincount(weights).cumsum(0)
    wanted = top_p * total
    reached = min(int((mass < wanted).sum()), len(mass) - 1)
    inside, order = values[layer == reached].sort(descending=True)
    mass_inside = weights[layer == reached][order].cumsum(0) + (mass[reached - 1] if reached else 0)
    last = min(int((mass_inside < wanted).sum()), len(inside) - 1)
    return heavy[values >= inside[last]]


def _draw(kept: list[tuple[torch.Tensor, torch.Tensor]], seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Gumbel-max over the kept tokens of each row, the noise of all rows in one go."""
    counts = [len(tokens) for tokens, _ in kept]
    row = torch.arange(len(kept), device=seed.device).repeat_interleave(torch.tensor(counts, device=seed.device))
    tokens = torch.cat([tokens for tokens, _ in kept])
    noise = gumbel(uniform_at(seed[row], position[row], tokens))
    scores = noise.add_(torch.cat([values for _, values in kept])).split(counts)
    return torch.stack([ids[part.argmax()] for (ids, _), part in zip(kept, scores, strict=True)])
