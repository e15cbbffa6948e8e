"""Many sums of random sizes, captured and eager in turns, each checked: some faults show only after thousands."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for

_SCALES = (1.0, 2.0, 4.0, 8.0)
_FACTORS = 7  # of sums that follow each other; a sum over up to 8 ranks times one of them stays exact in bfloat16
_IN_A_GRAPH = 20


@dataclass(frozen=True)
class Stress:
    """captured, eager: sums that were made. wrong: elements that were not what they must be, on all ranks together.

    algorithms: how often each stood in a graph.
    """

    captured: int
    eager: int
    wrong: int
    algorithms: dict[str, int]


class _Checked:
    """One sum after another: of a pattern with zeros, scaled by what the device holds, compared on the device. Each has
    a factor of its own, so that what is left of the one before is not taken for it."""

    def __init__(self, group: Group, all_reduce: AllReduce, dtype: torch.dtype) -> None:
        self._group, self._all_reduce, self._dtype = group, all_reduce, dtype
        self.scale = torch.ones((), device=group.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=group.device)
        self._ranks = group.world * (group.world + 1) // 2
        self._made = 0

    def pattern(self, nbytes: int) -> torch.Tensor:
        count = nbytes // self._dtype.itemsize
        return (torch.arange(count, device=self._group.device) % 3 != 0).to(self._dtype)

    def sum(self, pattern: torch.Tensor, *, residual: bool) -> None:
        factor = 1 + self._made % _FACTORS
        self._made += 1
        x = pattern * ((self._group.rank + 1) * factor * self.scale).to(self._dtype)
        expected = pattern * (self._ranks * factor * self.scale).to(self._dtype)
        found = self._all_reduce(x, pattern if residual else None)
        self.wrong += (found != (expected + pattern if residual else expected)).sum()


def stress(
    group: Group, all_reduce: AllReduce, *, captured: int, seed: int = 0, most_bytes: int = 4 << 20, graphs: int = 20
) -> Stress:
    """At least so many captured sums, and some eager ones between replays. Called on all ranks alike.

    Raises:
        CommError: a rank is gone, or a sum waited too long for one.
    """
    choose = random.Random(seed)  # the same on all ranks
    checked = _Checked(group, all_reduce, torch.bfloat16)
    platform = platform_for(group.device)

    def size() -> int:
        return 16 * int(2 ** choose.uniform(0, (most_bytes // 16).bit_length() - 1))

    recordings = []
    for index in range(graphs):
        patterns = [checked.pattern(size()) for _ in range(_IN_A_GRAPH)]

        def step(patterns: list[torch.Tensor] = patterns) -> None:
            for number, pattern in enumerate(patterns):
                checked.sum(pattern, residual=number % 3 == 0)

        platform.warm_up(step)
        all_reduce.begin(BatchDescriptor.decode(index + 1))
        recordings.append(platform.record(step, platform.new_pool())[0])
    all_reduce.exchange()
    eager_patterns = [checked.pattern(size()) for _ in range(64)]
    replays, eager = -(-captured // _IN_A_GRAPH), graphs * _IN_A_GRAPH  # of the warm-ups
    for turn in range(replays):
        checked.scale.fill_(choose.choice(_SCALES))
        recordings[choose.randrange(graphs)].replay()
        if choose.random() < 0.3:
            checked.sum(choose.choice(eager_patterns), residual=choose.random() < 0.5)
            eager += 1
        if turn % 100 == 0:
            platform.synchronize()
            all_reduce.check()
    platform.synchronize()
    all_reduce.check()
    wrong = sum(group.exchange(int(checked.wrong)))
    for recording in recordings:
        recording.release()
    counts: dict[str, int] = {}
    for frozen in all_reduce.log.by_key.values():
        for one in frozen:
            name = f"{one.choice.algorithm.value}, {one.choice.source.value}"
            counts[name] = counts.get(name, 0) + 1
    return Stress(replays * _IN_A_GRAPH, eager, wrong, counts)
