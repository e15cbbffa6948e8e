"""From what each algorithm took to the thresholds between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

from stepgraph.comm.thresholds import Thresholds

ORDER = ("one_shot_push", "one_shot_pull", "two_shot_pull", "library")
"""In which thresholds are asked: each algorithm up to its own, the last above all."""


def fit_thresholds(sizes: Sequence[int], times: Mapping[str, Mapping[int, float]]) -> Thresholds:
    """The thresholds with the least regret: the sum, over the sizes, of log(time taken / best time).

    sizes: in bytes, ascending. times: by algorithm of ORDER and size, in any unit; a size that an algorithm does not do
    is left out. The library does every size.
    """

    def cost(algorithm: str, size: int) -> float:
        took = times.get(algorithm, {}).get(size)
        return math.inf if took is None else math.log(took)

    # totals[a][i]: what algorithm a takes for the first i sizes
    totals = {a: _running([cost(a, size) for size in sizes]) for a in ORDER}
    count = len(sizes)

    def regret(cuts: tuple[int, int, int]) -> float:
        edges = (0, *cuts, count)
        spans = zip(ORDER, edges[:-1], edges[1:], strict=True)
        return sum(_between(totals[a], start, stop) for a, start, stop in spans)

    best = min(combinations_with_replacement(range(count + 1), 3), key=regret)
    push, pull, two_shot = (sizes[cut - 1] if cut else 0 for cut in best)
    return Thresholds(push, pull, two_shot)


def crossovers_differ(captured: Thresholds, eager: Thresholds) -> bool:
    """Whether some size takes another algorithm captured than eager."""
    return (captured.push, captured.pull, captured.two_shot) != (eager.push, eager.pull, eager.two_shot)


def _running(costs: Sequence[float]) -> list[tuple[float, int]]:
    """(sum of the finite ones, how many are not) of the first 0, 1, 2, ..."""
    totals, total, impossible = [(0.0, 0)], 0.0, 0
    for one in costs:
        if math.isinf(one):
            impossible += 1
        else:
            total += one
        totals.append((total, impossible))
    return totals


def _between(totals: Sequence[tuple[float, int]], start: int, stop: int) -> float:
    if totals[stop][1] > totals[start][1]:
        return math.inf
    return totals[stop][0] - totals[start][0]
