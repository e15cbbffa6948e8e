"""Many sums of random sizes, captured and eager in turns, each checked: some faults show only after thousands.

Sums stand between torch's kernels, straight behind each other, and behind a kernel that lets them in before it has
written what they sum: one that does not wait for what is in front of it shows in the second and the third.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.comm.thresholds import Table, Thresholds
from stepgraph.measure.all_reduce.late_writer import WriteLate
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.capturing import is_capturing

_SCALES = (1.0, 2.0, 4.0, 8.0)
_FACTORS = 5  # of runs that follow each other; what up to 8 ranks sum, up to three times, stays exact in bfloat16
_EAGER = 64  # patterns of eager sums
_TOLD = 5  # wrong sums of a rank that are described, the first ones


@dataclass(frozen=True)
class _Run:
    """Sums with no kernel of torch's between them.

    inputs: summed in turns, each `links` times, of which each sums what the one before gave. late: written late.
    """

    inputs: int = 1
    links: int = 1
    late: bool = False


_GRAPH = (*[_Run()] * 6, _Run(links=3), _Run(links=3), _Run(2, 2), _Run(late=True), _Run(late=True), _Run(1, 2, True))
_IN_A_GRAPH = sum(run.inputs * run.links for run in _GRAPH)


@dataclass(frozen=True)
class Stress:
    """captured, eager: sums that were made. wrong: elements that were not what they must be, on all ranks together.

    algorithms: of these sums how many each algorithm and source made, captured and eager, behind what.
    faults: each rank's first wrong results, and inputs that were overwritten.
    """

    captured: int
    eager: int
    wrong: int
    algorithms: dict[str, int]
    faults: list[str]


def small_thresholds(world: int) -> Table:
    """With these every algorithm and source sums some of the messages, captured and eager."""
    captured, eager = Thresholds(8 << 10, 64 << 10, 1 << 20), Thresholds(16 << 10, 128 << 10, 512 << 10)
    return Table("any", world, captured, eager, "small ones, for every algorithm to occur")


class _Checked:
    """One run of sums after another: of patterns with zeros, scaled by what the device holds, compared on the device.
    Each has a factor of its own, so that what is left of the one before is not taken for it.

    most: places in the program that compare; each notes on the device what was wrong there first.
    """

    def __init__(
        self, group: Group, all_reduce: AllReduce, dtype: torch.dtype, most: int, write_late: WriteLate | None
    ) -> None:
        self._group, self._all_reduce, self._dtype, self._write_late = group, all_reduce, dtype, write_late
        self.scale = torch.ones((), device=group.device)
        self.turn = torch.zeros(1, dtype=torch.float64, device=group.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=group.device)
        self._patterns: list[torch.Tensor] = []  # graphs read them, and keep none of them alive
        self._places: list[tuple[str, str]] = []  # each one's way, and the rest
        self._noted = torch.zeros(most, 5, dtype=torch.float64, device=group.device)
        self._made: Counter[str] = Counter()
        total = 1 << (group.world * (group.world + 1) // 2).bit_length()
        last = total - group.world * (group.world - 1) // 2  # a power of two together: sums of sums stay exact
        self._mine, self._total = last if group.rank == group.world - 1 else group.rank + 1, total

    def pattern(self, nbytes: int) -> torch.Tensor:
        self._patterns.append(self._new_pattern(nbytes // self._dtype.itemsize))
        return self._patterns[-1]

    def take_made(self) -> Counter[str]:
        """The sums since the last call, by way and what they stood behind."""
        made, self._made = self._made, Counter()
        return made

    def sum(self, patterns: list[torch.Tensor], run: _Run, where: str, *, residual: bool) -> None:
        """One run. residual: the last sum adds the pattern; of a run with one input."""
        late = run.late and self._write_late is not None
        behind = "a late writer" if late else "torch's"
        factors = [1 + (len(self._places) + number) % _FACTORS for number in range(run.inputs)]
        inputs, ways = [], [""] * run.inputs
        for pattern, factor in zip(patterns, factors, strict=True):
            x = pattern * (self._mine * factor * self.scale).to(self._dtype)
            inputs.append(self._written_late(x) if late else x)
        for link in range(run.links):
            for number, x in enumerate(inputs):
                adds = residual and link == run.links - 1
                ways[number] = self._way(x)
                self._made[f"{ways[number]}, behind {behind}"] += 1
                inputs[number] = self._all_reduce(x, patterns[number] if adds else None)
                behind = "a sum"
        grown = self._total * self._group.world ** (run.links - 1)
        rest = f"{', with a residual' if residual else ''}{', written late' if late else ''}"
        rest += f", {run.links} in a row" if run.links > 1 else ""
        for pattern, factor, way, found in zip(patterns, factors, ways, inputs, strict=True):
            self._places.append((way, f"{where}, {pattern.nbytes} bytes{rest}, factor {factor}"))
            expected = pattern * (grown * factor * self.scale).to(self._dtype)
            self._compare(found, expected + pattern if residual else expected)

    def _way(self, x: torch.Tensor) -> str:
        capturing = is_capturing(self._group.device)
        choice = self._all_reduce.choose(x, capturing=capturing)
        return f"{choice.algorithm}, {choice.source}, {'captured' if capturing else 'eager'}"

    def _written_late(self, x: torch.Tensor) -> torch.Tensor:
        assert self._write_late is not None
        target = torch.full_like(x, -1.0)  # what a sum that does not wait would find
        self._write_late(x, target)
        return target

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
    group: Group,
    all_reduce: AllReduce,
    *,
    captured: int,
    write_late: WriteLate | None = None,
    seed: int = 0,
    most_bytes: int = 4 << 20,
    graphs: int = 20,
) -> Stress:
    """At least so many captured sums, and some eager ones between replays. Called on all ranks alike.

    write_late: see `late_writer`; None: no sum stands behind one.

    Raises:
        CommError: a rank is gone, or a sum waited too long for one.
    """
    choose = random.Random(seed)  # the same on all ranks
    replays = -(-captured // _IN_A_GRAPH)
    checked = _Checked(group, all_reduce, torch.bfloat16, 2 * graphs * _IN_A_GRAPH + replays, write_late)
    platform = platform_for(group.device)

    def size() -> int:
        return 16 * int(2 ** choose.uniform(0, (most_bytes // 16).bit_length() - 1))

    recordings, in_graph = [], []
    eager: Counter[str] = Counter()
    for index in range(graphs):
        patterns = [[checked.pattern(size()) for _ in range(run.inputs)] for run in _GRAPH]

        def step(index: int = index, patterns: list[list[torch.Tensor]] = patterns) -> None:
            for number, (run, own) in enumerate(zip(_GRAPH, patterns, strict=True)):
                adds = number % 3 == 0 and run.inputs == 1
                checked.sum(own, run, f"graph {index}, run {number}", residual=adds)

        platform.warm_up(step)
        eager += checked.take_made()
        all_reduce.begin(BatchDescriptor.decode(index + 1))
        recordings.append(platform.record(step, platform.new_pool())[0])
        in_graph.append(checked.take_made())
    all_reduce.exchange()
    eager_patterns = [checked.pattern(size()) for _ in range(_EAGER)]
    eager_runs = [run for run in _GRAPH if run.inputs == 1]
    replayed: Counter[int] = Counter()
    for turn in range(replays):
        checked.scale.fill_(choose.choice(_SCALES))
        checked.turn.fill_(1 + turn)  # 0: the warm-ups
        index = choose.randrange(graphs)
        recordings[index].replay()
        replayed[index] += 1
        if choose.random() < 0.3:
            pattern, run = choose.choice(eager_patterns), choose.choice(eager_runs)
            checked.sum([pattern], run, "between replays", residual=choose.random() < 0.5)
        if turn % 100 == 0:
            platform.synchronize()
            all_reduce.check()
    platform.synchronize()
    all_reduce.check()
    wrong = sum(group.exchange(int(checked.wrong)))  # from here on nobody replays
    faults = [one for told in group.exchange(checked.faults()) for one in told]
    for recording in recordings:
        recording.release()
    eager += checked.take_made()
    made = Counter(eager)
    for index, times in replayed.items():
        made.update({name: count * times for name, count in in_graph[index].items()})
    return Stress(replays * _IN_A_GRAPH, eager.total(), wrong, dict(sorted(made.items())), faults)
