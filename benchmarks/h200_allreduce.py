"""All-reduces on the GPUs of one node, captured and eager: ours, NCCL's and torch's, in turns, by the device's clock.

torchrun --standalone --nproc-per-node 2 benchmarks/h200_allreduce.py [--ours] [--out DIR] [--stress N] [--samples N]

Any number of ranks from 2 to 8. Rank 0 writes DIR/h200_allreduce_xN.json and the tuned table
(DIR/tables/nvidia_h200_xN.json, to go to src/stepgraph/comm/tables) once all is measured; and the JSON once more with
what follows, and the picture beside it. DIR: benchmarks/results by default. --ours: without torch's operators, of which
one that fails takes the process along. A way that fails is named, with the size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, commit, machine, versions, write_result

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.communicator import make_all_reduce
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.comm.ranks import Ranks
from stepgraph.comm.thresholds import Table, Thresholds, write_table
from stepgraph.measure.all_reduce.draw import draw
from stepgraph.measure.all_reduce.fit import crossovers_differ
from stepgraph.measure.all_reduce.late_writer import late_writer
from stepgraph.measure.all_reduce.stress import Stress, small_thresholds, stress
from stepgraph.measure.all_reduce.timing import Times, time_ways
from stepgraph.measure.all_reduce.tune import SIZES, fitted
from stepgraph.measure.all_reduce.ways import our_ways, torch_ways
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.platforms import platform_for

KIB, MIB = 1 << 10, 1 << 20
BARS = {8 * KIB: 4.0, 64 * KIB: 4.5, 256 * KIB: 5.5, MIB: 8.0, 8 * MIB: 36.0}  # µs, captured, two ranks
PUBLISHED = {8 * KIB: 2.5, 64 * KIB: 2.9, 256 * KIB: 3.6, MIB: 5.9, 8 * MIB: 29.5}  # SGLang 0.5.14, two ranks
WIDE = Thresholds(16 * MIB, 16 * MIB, 128 * MIB)
SHOWN = ("one_shot_push", "one_shot_pull", "two_shot_pull", "library", "torch one-shot", "torch two-shot")


def algorithm(limits: Thresholds, nbytes: int) -> str:
    for name, limit in zip(SHOWN, (limits.push, limits.pull, limits.two_shot), strict=False):
        if nbytes <= limit:
            return name
    return "library"


def frozen_beside_eager(group: Group, table: Table) -> dict[str, Any] | None:
    """A message that takes another algorithm captured than eager, as the graph's own record has it."""
    found = None
    all_reduce = make_all_reduce(group, table=table)
    for nbytes in SIZES:
        if algorithm(table.captured, nbytes) == algorithm(table.eager, nbytes):
            continue
        x = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=group.device)
        eager = all_reduce.choose(x, capturing=False)
        key, platform = BatchDescriptor.decode(1), platform_for(group.device)
        all_reduce.begin(key)
        recording, _ = platform.record(lambda x=x: all_reduce(x), platform.new_pool())
        all_reduce.exchange()
        found = {"eager": {"algorithm": eager.algorithm, "reason": eager.reason}}
        found["captured"] = all_reduce.log.by_key[key][0].as_dict()
        recording.release()
        break
    all_reduce.close()
    return found


def rows(times: dict[int, Times], table: Table) -> list[list[Any]]:
    found = []
    for nbytes, took in sorted(times.items()):
        for captured, limits in ((True, table.captured), (False, table.eager)):
            medians = [statistics.median(took[name, captured]) if (name, captured) in took else None for name in SHOWN]
            found.append([nbytes // KIB, "graph" if captured else "eager", algorithm(limits, nbytes), *medians])
    return found


def complaints(world: int, times: dict[int, Times], table: Table) -> list[str]:
    found = []
    for nbytes, bar in BARS.items() if world == 2 else ():
        took = statistics.median(times[nbytes][algorithm(table.captured, nbytes), True])
        print(f"{nbytes // KIB:>6} KiB in a graph: {took:.2f} µs; bar {bar}, published {PUBLISHED[nbytes]}")
        if took > bar:
            found.append(f"{nbytes // KIB} KiB takes {took:.2f} µs, over the bar of {bar}")
    return found


def measure(group: Group, all_reduce: AllReduce, samples: int, ours: bool) -> dict[int, Times]:
    times: dict[int, Times] = {}
    for nbytes in (SIZES[0], *SIZES):  # the first is thrown away: what is measured first takes longer
        ways = [*our_ways(group, all_reduce), *([] if ours else torch_ways(group))]
        try:
            times[nbytes] = time_ways(group, all_reduce, ways, nbytes, samples=samples)
        except CommError as error:
            print(f"rank {group.rank}: {error}", flush=True)  # before what its end prints
            raise
        if group.rank == 0:
            medians = {f"{name}{'' if captured else ', eager'}": round(statistics.median(took), 2)
                       for (name, captured), took in times[nbytes].items()}  # fmt: skip
            print(f"{nbytes // KIB:>7} KiB {medians}", flush=True)
    return times


def stressed(group: Group, table: Table, captured: int) -> dict[str, Stress]:
    """Half of the sums by the table that was fitted, where push may be all; half with every algorithm."""
    found = {}
    cases = {"fitted thresholds": (table, 16 * MIB), "small thresholds": (small_thresholds(group.world), 4 * MIB)}
    for name, (one, most_bytes) in cases.items():
        all_reduce = make_all_reduce(group, table=one)
        late = late_writer(group.device)
        found[name] = stress(group, all_reduce, captured=captured // 2, most_bytes=most_bytes, write_late=late)
        all_reduce.close()
    return found


def stress_complaints(found: dict[str, Stress]) -> list[str]:
    told = []
    for name, one in found.items():
        told += [f"{name}: {one.wrong} wrong elements in the stress test"] if one.wrong else []
        told += [f"{name}: {fault}" for fault in one.faults]
    captured = [name for name in found["small thresholds"].algorithms if ", captured, " in name]
    ways = ("one_shot_push, pushed", "one_shot_pull, pointer row", "two_shot_pull, pointer row", "library, own")
    told += [f"small thresholds: no graph has {way}" for way in ways if not any(way in name for name in captured)]
    told += [f"no sum stood behind {what}" for what in ("a sum", "a late writer")
             if not any(name.endswith(f"behind {what}") for name in captured)]  # fmt: skip
    return told


def result(times: dict[int, Times], table: Table, samples: int) -> dict[str, Any]:
    differ = crossovers_differ(table.captured, table.eager)
    return {
        "name": f"h200_allreduce_x{table.world}",
        "definition": f"One all-reduce of bfloat16 on {table.world} GPUs, device time, the slowest rank's, median of "
        f"{samples}: several in a graph, or launched while the device is held, ranks lined up before. `library` is "
        f"NCCL. The table's choice stands beside. Crossovers captured and eager "
        f"{'differ' if differ else 'are the same'}. Push, and eagerly the pulls too, are measured up to the "
        f"{WIDE.push // MIB} MiB of their slots and staging buffer: a threshold there is that room, and no crossover.",
        "unit": "µs",
        "machine": machine(),
        "versions": versions("torch", "triton", "cuda-bindings"),
        "commit": commit(),
        "columns": ["KiB", "where", "choice", *SHOWN],
        "rows": rows(times, table),
        "table": table.as_dict(),
        "samples": {str(size): {f"{name}, {'graph' if captured else 'eager'}": taken
                                for (name, captured), taken in took.items()}
                    for size, took in times.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--stress", type=int, default=50_000)
    parser.add_argument("--ours", action="store_true")
    options = parser.parse_args()
    ranks = Ranks.of(os.environ)
    if ranks is None:
        parser.error("start it with torchrun")
    with Group(ranks, "cuda") as group, torch.inference_mode():
        all_reduce = make_all_reduce(group, table=Table("any", group.world, WIDE, WIDE, "for measuring"))
        times = measure(group, all_reduce, options.samples, options.ours)
        table = fitted(torch.cuda.get_device_name(group.device), group.world, times)
        group.agree("the table that was fitted", table.as_dict())
        all_reduce.close()
        wrong = complaints(group.world, times, table) if group.rank == 0 else []
        if group.rank == 0:
            write_result(result(times, table, options.samples), options.out)
            print(f"table: {write_table(table, options.out / 'tables')}", *rows(times, table), sep="\n", flush=True)
        other = frozen_beside_eager(group, table)
        checked = stressed(group, table, options.stress)
        if group.rank:
            return 0
        print(f"one message, two algorithms: {other}", f"stress: {checked}", sep="\n")
        wrong += stress_complaints(checked)
        found = result(times, table, options.samples)
        stress_results = {name: asdict(one) for name, one in checked.items()}
        write_result({**found, "one message, two algorithms": other, "stress": stress_results}, options.out)
        print("\n".join(wrong) or "within the bars, every sum right", flush=True)
        draw(times, table, options.out / f"h200_allreduce_x{group.world}.png")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
