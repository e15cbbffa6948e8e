"""Sampling in plain torch: the truth in tests, and what runs on the CPU. Works only for what each row asks."""

import math
from collections.abc import Iterator

import torch

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.philox import gumbel, uniform_at, uniform_rows

GREEDY_BELOW = 2.0**-17
"""Temperatures under this are greedy: dividing by them would overflow and make ties of different logits."""

_LARGEST = torch.finfo(torch.float32).max
_ROWS_AT_ONCE = 4  # whole rows made together: few enough for the scratch to stay in the caches
_LAYERS_PER_NAT = 8


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> None:
    """`sample` without the custom operator; see there."""
    vocab, device = logits.shape[1], logits.device
    floors = [0.0] * len(out) if min_p is None else min_p.tolist()
    asked = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), floors, strict=True))
    noisy = [row for row, (t, *_) in enumerate(asked) if t >= GREEDY_BELOW]
    filtered = [row for row in noisy if 0 < asked[row][1] < vocab or asked[row][2] < 1 or asked[row][3] > 0]
    plain = sorted(set(noisy) - set(filtered))
    penalties = Penalties.given(repetition_penalty, presence_penalty, frequency_penalty, seen)
    penalised = set() if penalties is None else set(penalties.asked().nonzero()[:, 0].tolist())

    def values(rows: list[int]) -> torch.Tensor:
        if penalties is None or penalised.isdisjoint(rows):
            return logits[rows]
        return penalties.of(torch.tensor(rows, device=device)).apply(logits[rows])

    if len(noisy) < len(asked):
        out.copy_(_argmax(logits))
        for rows in _few(sorted(penalised - set(noisy))):
            out[rows] = _argmax(values(rows))
    for rows in _few(plain):
        noise = gumbel(uniform_rows(seed[rows], position[rows], vocab))
        out[rows] = _argmax(noise.add_(_scaled(values(rows), temperature[rows, None])))
    if filtered:
        kept = [_kept(_scaled(values([row])[0], temperature[row]), *asked[row][1:]) for row in filtered]
        out[filtered] = _draw(kept, seed[filtered], position[filtered])
    if penalties is not None and penalised:
        penalties.note(out)


def _few(rows: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[start : start + _ROWS_AT_ONCE]


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature as float32, finite or -inf: NaN counts as -inf, +inf as the largest number."""
    return (logits.float() / temperature).nan_to_num_(float("-inf"), _LARGEST, float("-inf"))


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """Per row the lowest index of the largest value that is not NaN; 0 where there is none.

    `amax` is vectorised on the CPU and `argmax` is not: find the tile first, then the place in it.
    """
    tile = math.gcd(x.shape[1], 512)
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


def _kept(x: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What min-p, then top-k, then top-p leave of a row of scaled logits: token ids, ascending, and their values."""
    tokens: torch.Tensor | None = None
    if min_p > 0:
        tokens = (x >= x.amax() + min(math.log(min_p), 0.0)).nonzero()[:, 0]
        x = x[tokens]
    if 0 < top_k < len(x):
        largest = _largest(x, top_k)
        tokens, x = largest if tokens is None else tokens[largest], x[largest]
    if top_p < 1 or tokens is None:
        nucleus = _nucleus(x, top_p)
        tokens, x = nucleus if tokens is None else tokens[nucleus], x[nucleus]
    return tokens, x


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values and of their equals."""
    tiles = x.unflatten(0, (-1, math.gcd(len(x), 128))).amax(-1)
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
