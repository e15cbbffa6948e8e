"""A table of thresholds for the GPUs here, measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.comm.thresholds import Table
from stepgraph.measure.all_reduce.fit import ORDER, fit_thresholds
from stepgraph.measure.all_reduce.timing import Times, time_ways
from stepgraph.measure.all_reduce.ways import our_ways
from stepgraph.measure.machine import commit, versions

SIZES = tuple(1024 << power for power in range(18))
"""1 KiB to 128 MiB."""


@dataclass(frozen=True)
class Tuned:
    """times: by size in bytes. table: what follows from them."""

    times: dict[int, Times]
    table: Table


def tune(
    group: Group,
    all_reduce: AllReduce,
    *,
    sizes: Sequence[int] = SIZES,
    samples: int = 15,
    progress: Callable[[int, int, str], None] | None = None,
) -> Tuned:
    """Measure every algorithm at every size, captured and eager, and fit the thresholds. Called on all ranks alike."""
    ways, times = our_ways(group, all_reduce), {}
    time_ways(group, all_reduce, ways, sizes[0], samples=1)  # thrown away: what is measured first takes longer
    for done, nbytes in enumerate(sizes):
        if progress is not None:
            progress(done, len(sizes), f"{nbytes // 1024} KiB")
        times[nbytes] = time_ways(group, all_reduce, ways, nbytes, samples=samples)
    return Tuned(times, fitted(torch.cuda.get_device_name(group.device), group.world, times))


def fitted(device: str, world: int, times: dict[int, Times]) -> Table:
    """The table that these times give."""

    def medians(captured: bool) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {name: {} for name in ORDER}
        for size, took in times.items():
            for (name, which), samples in took.items():
                if which == captured and name in found:
                    found[name][size] = statistics.median(samples)
        return found

    sizes = sorted(times)
    captured, eager = (fit_thresholds(sizes, medians(which)) for which in (True, False))
    torch_version = versions().get("torch", torch.__version__)
    source = f"stepgraph tune allreduce, bfloat16, commit {commit()}, torch {torch_version}"
    return Table(device, world, captured, eager, source)
