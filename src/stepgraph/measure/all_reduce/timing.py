"""The device's time for one sum over ranks: the host ahead of the device, and the ranks lined up before the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.measure.all_reduce.ways import Way
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for

_HOLD_CYCLES = 20_000_000  # of the device, some 10 ms, in which the host enqueues what is measured

Times = dict[tuple[str, bool], list[float]]
"""By way and whether captured, the microseconds of each sample."""


@dataclass(frozen=True)
class _Run:
    """once: one sum; it holds the input, of which a graph has the address only. launch: enqueues several sums.
    release: once they have run.
    """

    once: Callable[[], object]
    launch: Callable[[], object]
    release: Callable[[], object]


def time_ways(group: Group, all_reduce: AllReduce, ways: Sequence[Way], nbytes: int, *, samples: int) -> Times:
    """Microseconds of one sum: of each sample the slowest rank's. Called on all ranks alike.

    Ways take turns, so that a drift of the machine meets all alike; those that do not do this size are left out.
    Captured, a graph of several sums is replayed; eager, as many are launched while the device is held. Inputs stay
    until all ranks are through: symmetric memory that is given back is unmapped at once, on its peers too.

    Raises:
        CommError: a rank is gone, a sum waited too long for one, or a way failed, whose name and size it says.
    """
    count = _count(nbytes)
    runs: dict[tuple[str, bool], _Run] = {}
    for way in ways:
        with _naming(way.name, way.captured, nbytes):
            once = way.prepare(nbytes)
            if once is None:
                continue
            run = _recorded(group, all_reduce, once, count) if way.captured else _eager(once, count)
            run.launch()
            platform_for(group.device).synchronize()  # what goes wrong on the device is this way's
        runs[way.name, way.captured] = run
    mine: Times = {key: [] for key in runs}
    for _ in range(samples):
        for key, run in runs.items():
            with _naming(*key, nbytes):
                mine[key].append(_sample_us(group, run) / count)
    all_reduce.check()
    everyone: list[Times] = group.exchange(mine)
    for run in runs.values():
        run.release()
    return {key: [max(values) for values in zip(*(theirs[key] for theirs in everyone), strict=True)] for key in runs}


def _eager(once: Callable[[], object], count: int) -> _Run:
    def launch() -> None:
        for _ in range(count):
            once()

    return _Run(once, launch, lambda: None)


def _recorded(group: Group, all_reduce: AllReduce, once: Callable[[], object], count: int) -> _Run:
    platform, several = platform_for(group.device), _eager(once, count).launch
    all_reduce.begin(BatchDescriptor.decode(1))
    recording, _ = platform.record(several, platform.new_pool())
    all_reduce.exchange()
    return _Run(once, recording.replay, recording.release)


@contextmanager
def _naming(name: str, captured: bool, nbytes: int) -> Iterator[None]:
    try:
        yield
    except (CommError, RuntimeError) as error:
        what = str(error).splitlines()[0]
        raise CommError(f"{name}, {'captured' if captured else 'eager'}, {nbytes} bytes: {what}") from error


def _sample_us(group: Group, run: _Run) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    group.exchange(None)
    torch.cuda._sleep(_HOLD_CYCLES)
    group.all_reduce_(torch.zeros(1, device=group.device))  # the ranks' devices begin together
    start.record()
    run.launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _count(nbytes: int) -> int:
    """Sums of a sample: some milliseconds, and enough of them to hide its ends."""
    return 50 if nbytes <= 1 << 20 else 20 if nbytes <= 16 << 20 else 5
