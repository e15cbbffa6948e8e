"""Many sums of random sizes, captured and eager in turns, each checked: some faults show only after thousands."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.capturing import is_capturing

_SCALES = (1.0, 2.0, 4.0, 8.0)
_FACTORS = 7  # of sums that follow each other; a sum over up to 8 ranks times one of them stays exact in bfloat16
_IN_A_GRAPH = 20
_EAGER = 64  # patterns of eager sums
_TOLD = 5  # wrong sums of a rank that are described, the first ones


@dataclass(frozen=True)
class Stress:
    """captured, eager: sums that were made. wrong: elements that were not what they must be, on all ranks together.

    algorithms: how often each stood in a graph. faults: each rank's first wrong sums, and inputs that were overwritten.
    """

    captured: int
    eager: int
    wrong: int
    algorithms: dict[str, int]
    faults: list[str]


class _Checked:
    """One sum after another: of a pattern with zeros, scaled by what the device holds, compared on the device. Each has
    a factor of its own, so that what is left of the one before is not taken for it.

    most: places in the program that sum; each notes on the device what was wrong there first.
    """

    def __init__(self, group: Group, all_reduce: AllReduce, dtype: torch.dtype, most: int) -> None:
        self._group, self._all_reduce, self._dtype = group, all_reduce, dtype
        self.scale = torch.ones((), device=group.device)
        self.turn = torch.zeros(1, dtype=torch.float64, device=group.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=group.device)
        self._patterns: list[torch.Tensor] = []  # graphs read them, and keep none of them alive
        self._places: list[tuple[str, str]] = []  # each one's way, and the rest
        self._noted = torch.zeros(most, 5, dtype=torch.float64, device=group.device)
        self._ranks = group.world * (group.world + 1) // 2

    def pattern(self, nbytes: int) -> torch.Tensor:
        self._patterns.append(self._new_pattern(nbytes // self._dtype.itemsize))
        return self._patterns[-1]

    def sum(self, pattern: torch.Tensor, where: str, *, residual: bool) -> None:
        factor = 1 + len(self._places) % _FACTORS
        x = pattern * ((self._group.rank + 1) * factor * self.scale).to(self._dtype)
        expected = pattern * (self._ranks * factor * self.scale).to(self._dtype)
        capturing = is_capturing(self._group.device)
        choice = self._all_reduce.choose(x, capturing=capturing)
        way = f"{choice.algorithm}, {choice.source}, {'captured' if capturing else 'eager'}"
        rest = f"{where}, {pattern.nbytes} bytes{', with a residual' if residual else ''}, factor {factor}"
        self._places.append((way, rest))
        found = self._all_reduce(x, pattern if residual else None)
        self._compare(found, expected + pattern if residual else expected)

    def faults(self) -> list[str]:
        """What was wrong on this rank, the earliest first. Waits for the device."""
        noted = self._noted.tolist()
        wrong = [place for place in range(len(self._places)) if noted[place][0]]
        wrong.sort(key=lambda place: (noted[place][1], place))
        told = []
        for place in wrong[:_TOLD]:
            (way, rest), (_, turn, at, found, expected) = self._places[place], noted[place]
            told.append(f"turn {turn:.0f}: {way}; {rest}: element {at:.0f} is {found}, not {expected}")
        if wrong:
            by_way = dict(Counter(self._places[place][0] for place in wrong))
            told.append(f"of {len(self._places)} places {len(wrong)} were wrong once or more: {by_way}")
        for number, pattern in enumerate(self._patterns):
            changed = int((pattern != self._new_pattern(pattern.numel())).sum())
            if changed:
                told.append(f"pattern {number}, {pattern.nbytes} bytes: {changed} elements were overwritten")
        return [f"rank {self._group.rank}: {one}" for one in told]

    def _new_pattern(self, count: int) -> torch.Tensor:
        return (torch.arange(count, device=self._group.device) % 3 != 0).to(self._dtype)

    def _compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        bad = found != expected
        self.wrong += bad.sum()
        at = bad.to(torch.int8).argmax().view(1)  # the first
        parts = (bad.any().view(1), self.turn, at, found[at], expected[at])
        noted = self._noted[len(self._places) - 1]
        noted.copy_(torch.where(noted[0] > 0, noted, torch.cat([part.double() for part in parts])))


def stress(
    group: Group, all_reduce: AllReduce, *, captured: int, seed: int = 0, most_bytes: int = 4 << 20, graphs: int = 20
) -> Stress:
    """At least so many captured sums, and some eager ones between replays. Called on all ranks alike.

    Raises:
        CommError: a rank is gone, or a sum waited too long for one.
    """
    choose = random.Random(seed)  # the same on all ranks
    replays = -(-captured // _IN_A_GRAPH)
    checked = _Checked(group, all_reduce, torch.bfloat16, 2 * graphs * _IN_A_GRAPH + replays)
    platform = platform_for(group.device)

    def size() -> int:
        return 16 * int(2 ** choose.uniform(0, (most_bytes // 16).bit_length() - 1))

    recordings = []
    for index in range(graphs):
        patterns = [checked.pattern(size()) for _ in range(_IN_A_GRAPH)]

        def step(index: int = index, patterns: list[torch.Tensor] = patterns) -> None:
            for number, pattern in enumerate(patterns):
                checked.sum(pattern, f"graph {index}, sum {number}", residual=number % 3 == 0)

        platform.warm_up(step)
        all_reduce.begin(BatchDescriptor.decode(index + 1))
        recordings.append(platform.record(step, platform.new_pool())[0])
    all_reduce.exchange()
    eager_patterns = [checked.pattern(size()) for _ in range(_EAGER)]
    eager = graphs * _IN_A_GRAPH  # of the warm-ups
    for turn in range(replays):
        checked.scale.fill_(choose.choice(_SCALES))
        checked.turn.fill_(1 + turn)  # 0: the warm-ups
        recordings[choose.randrange(graphs)].replay()
        if choose.random() < 0.3:
            checked.sum(choose.choice(eager_patterns), "between replays", residual=choose.random() < 0.5)
            eager += 1
        if turn % 100 == 0:
            platform.synchronize()
            all_reduce.check()
    platform.synchronize()
    all_reduce.check()
    wrong = sum(group.exchange(int(checked.wrong)))  # from here on nobody replays
    faults = [one for told in group.exchange(checked.faults()) for one in told]
    for recording in recordings:
        recording.release()
    counts: dict[str, int] = {}
    for frozen in all_reduce.log.by_key.values():
        for one in frozen:
            name = f"{one.choice.algorithm.value}, {one.choice.source.value}"
            counts[name] = counts.get(name, 0) + 1
    return Stress(replays * _IN_A_GRAPH, eager, wrong, counts, faults)
