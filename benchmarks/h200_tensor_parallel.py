"""A whole decode step on several GPUs, Llama-3's shapes in bfloat16: graph beside eager, nodes counted, in its share.

torchrun --standalone --nproc-per-node 2 benchmarks/h200_tensor_parallel.py [--shape llama-3-8b] [--rows 1,16,64]
    [--operations unfused,unfused+nccl,fused] [--tables DIR] [--out DIR]

Any number of ranks that the heads allow: 4 and 8 too, and --shape llama-3-70b. Weights are random, made on the devices.
With `+nccl` all sums go through NCCL. Of each of the operations rank 0 writes DIR/h200_tp_SHAPE_OPERATIONS_xN.json as
soon as it is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, commit, device_ms, machine, quantiles, versions, write_result

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.communicator import make_all_reduce
from stepgraph.comm.group import Group
from stepgraph.comm.ranks import Ranks
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.parallel import TensorParallel
from stepgraph.engine.random_model import random_model
from stepgraph.measure.census import Census, census
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.stream import read_limit
from stepgraph.runtime import GraphConfig, Ladder

CONTEXT, REPLAYS, EAGER_STEPS = 512, 200, 20
HOST_US = 3.0  # of one launch; benchmarks' `launch` measures it
BARS_MS = {"unfused": 3.0, "fused": 2.15}  # 8B on two ranks, batch 1
SUMS = 2  # of a layer
CHAPTER = 330 + 64 + 1  # launches of a step of 8B: of one rank, its sums, the gather; the sampler takes seven of them


@dataclass(frozen=True)
class Step:
    """One batch size. us: of each step, the slowest rank's. token: of each rank, graph and eager."""

    rows: int
    graph_ms: list[float]
    eager_ms: list[float]
    tokens: list[tuple[list[int], list[int]]]
    counted: Census
    frozen: dict[str, int]


def bytes_read(model: DecoderModel, rows: int) -> int:
    """Of one rank's step: its weights, but for the embedding's other rows, and the rows' keys and values."""
    weights = [model.lm_head, model.final_norm]
    for layer in model.layers:
        weights += [w for w in vars(layer).values() if w is not None]
    config = model.config
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return sum(w.numel() * w.element_size() for w in weights) + rows * CONTEXT * kv


def slowest(group: Group, mine: list[float]) -> list[float]:
    return [max(taken) for taken in zip(*group.exchange(mine), strict=True)]


def decode(group: Group, parallel: TensorParallel, model: DecoderModel, rows: int) -> Step:
    graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([rows]))
    decoder = DecodeRows(model, graphs, rows=rows, context=CONTEXT, parallel=parallel)
    decoder.core.capture()
    decoder.stage(rows)
    eager = decoder.another(GraphConfig.preset("NONE"))

    def tokens(runner: Any) -> list[int]:
        decoder.rewind()
        decoder.buffers["tokens"][:rows] = 1
        found: list[int] = runner(num_requests=rows).tokens.tolist()
        return found

    def times(runner: Any, count: int) -> list[float]:
        group.exchange(None)
        return slowest(group, device_ms(lambda: runner(num_requests=rows), count, before=decoder.rewind))

    both = tokens(decoder.runner), tokens(eager)
    graph_ms, eager_ms = times(decoder.runner, REPLAYS), times(eager, EAGER_STEPS)
    parallel.check()
    frozen: dict[str, int] = {}
    for collectives in parallel.frozen().values():
        for one in collectives:
            name = f"{one['kind']}: {one['algorithm']}, {one['source']}, {one['bytes']} bytes"
            frozen[name] = frozen.get(name, 0) + 1
    counted = census(decoder.runner.graph_nodes(rows))
    every = group.exchange(both)
    decoder.core.release()
    parallel.all_reduce.log.by_key.clear()
    return Step(rows, graph_ms, eager_ms, every, counted, frozen)


def line(step: Step, floor_ms: float) -> list[Any]:
    graph, eager = quantiles(step.graph_ms), statistics.median(step.eager_ms)
    launches = step.counted.launches
    host_ms = launches * HOST_US / 1e3
    return [step.rows, graph["median"], graph["p10"], graph["p90"], eager, floor_ms, floor_ms / graph["median"],
            launches, host_ms]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--operations", default="unfused,unfused+nccl,fused")
    parser.add_argument("--tables", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    ranks = Ranks.of(os.environ)
    if ranks is None:
        parser.error("start it with torchrun")
    wrong = []
    with Group(ranks, "cuda") as group, torch.inference_mode():
        limit = read_limit()["median"]
        for operations in options.operations.split(","):
            wrong += measure(group, operations, limit, options)
        if group.rank == 0:
            print("; ".join(wrong) or "same tokens on all ranks, graph and eager")
    return 1 if wrong else 0


def measure(group: Group, name: str, limit: float, options: argparse.Namespace) -> list[str]:
    """One of the operations, with its file. Returns what is not as it must be; on rank 0."""
    operations, _, library = name.partition("+")
    ours = not library
    all_reduce = make_all_reduce(group, tables=options.tables) if ours else AllReduce(group, why_library="asked for")
    parallel = TensorParallel(group, all_reduce)
    model = random_model(
        options.shape, device=group.device, dtype=torch.bfloat16, max_positions=CONTEXT + 1, operations=operations,
        parallel=parallel,
    )  # fmt: skip
    steps = [decode(group, parallel, model, int(rows)) for rows in options.rows.split(",")]
    if group.rank:
        return []
    lines = [line(step, bytes_read(model, step.rows) / limit * 1e3) for step in steps]
    for step, found in zip(steps, lines, strict=True):
        print(name, found, step.frozen, f"layers of {sorted(set(step.counted.layers))}", step.counted.operations,
              step.counted.around, step.counted.added, sep="\n  ", flush=True)  # fmt: skip
    write_result(
        {
            "name": f"h200_tp_{options.shape}_{name}_x{group.world}".replace("-", "_").replace("+", "_"),
            "definition": f"One decode step of {options.shape} on {group.world} GPUs, random bfloat16 weights, greedy, "
            f"context {CONTEXT}, `{operations}` operations{'' if ours else ', sums by NCCL'}, an engine whose "
            f"requests may filter: device time, the slowest rank's. The floor is what a rank reads at "
            f"{limit / 1e12:.2f} TB/s, measured in the same run. Launches are the nodes of a rank's graph without "
            f"events; what they take the host eagerly is their number times {HOST_US} µs.",
            "unit": "ms; launches are a count",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["rows", "graph", "p10", "p90", "eager", "floor", "floor / graph", "launches", "host"],
            "rows": lines,
            "counts": {str(step.rows): step.counted.to_json() for step in steps},
            "collectives": {str(step.rows): step.frozen for step in steps},
            "tokens": {str(step.rows): step.tokens for step in steps},
            "samples": {str(s.rows): {"graph": s.graph_ms, "eager": s.eager_ms} for s in steps},
        },
        options.out,
    )
    wrong = [complaint for step in steps for complaint in complaints(step, operations, len(model.layers))]
    print(f"{name}, {lines[0][0]} rows: {lines[0][1]:.3f} ms; {steps[0].counted.own} launches and "
          f"{sum(steps[0].counted.added.values())} of libraries, {CHAPTER} by the chapter")  # fmt: skip
    bar = BARS_MS.get(name) if (options.shape, group.world, lines[0][0]) == ("llama-3-8b", 2, 1) else None
    if bar is not None and lines[0][1] > bar:
        wrong.append(f"{lines[0][1]:.2f} ms, over the bar of {bar}")
    return [f"{name}: {one}" for one in wrong]


def complaints(step: Step, operations: str, layers: int) -> list[str]:
    found = []
    if len({str(tokens) for both in step.tokens for tokens in both}) > 1:
        found.append(f"{step.rows} rows: tokens differ: {step.tokens}")
    gathers = sum(count for region, count in step.counted.around.items() if region.endswith("gather"))
    sums = step.counted.operations.get("all_reduce")
    if operations == "unfused" and (sums, gathers) != (SUMS * layers, 1):
        found.append(f"{step.rows} rows: {sums} sums and {gathers} gathers; {SUMS} a layer and one are expected")
    return found


if __name__ == "__main__":
    sys.exit(main())
