"""Steady decode on an H200: the engine's loop beside its bare graph, the host's time, and the device's gaps.

python benchmarks/h200_steady.py [--shapes llama-3-8b,llama-3.2-1b] [--rows 1,13,256]

Each shape has a file of its own.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
from itertools import groupby, pairwise, product
from typing import Any

import torch
from common import commit, device_ms, in_turns, machine, quantiles, ratio, versions, write_result
from steady import SteadyEngine

from stepgraph.engine.loops import AUTO, steps_ahead
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.random_model import random_model
from stepgraph.measure.trace.profiler import cuda_profiler, profiled_trace

PROMPT, ROUNDS, STEPS, HOST_STEPS, TRACED = 64, 10, 32, 320, 48
HOST_BARS, GAP_BAR, MANY_BAR = {13: 15.0, 256: 60.0}, 5.0, 1.0  # µs
LAUNCHES = 5


@torch.inference_mode()
def trace_gaps(model: DecoderModel, rows: int) -> dict[str, Any]:
    """µs that the device idles between the last work of a step and the first of the next."""
    engine = SteadyEngine(model, rows, PROMPT, TRACED + 200)
    engine.host_us(64)
    with cuda_profiler() as profiler:
        for _ in range(TRACED):
            engine.step()
        torch.cuda.synchronize()
    work = sorted(profiled_trace(profiler).activities, key=lambda a: (a.start, a.stop))
    launches = [list(group) for _, group in groupby(work, key=lambda a: a.correlation)]
    ends = [(group[0].start, max(a.stop for a in group)) for group in launches]
    nodes = statistics.median(len(group) for group in launches)
    steps = [end for end, group in zip(ends, launches, strict=True) if len(group) >= nodes / 2]
    return {"gaps": [after[0] - before[1] for before, after in pairwise(steps)]}


@torch.inference_mode()
def measure(model: DecoderModel, rows: int) -> dict[str, Any]:
    engine = SteadyEngine(model, rows, PROMPT, HOST_STEPS + 2 * STEPS * (ROUNDS + 2) + 200)
    engine.host_us(64)

    def bare() -> float:
        found = statistics.median(device_ms(engine.bare_step, STEPS, warm=0))
        engine.rewind(STEPS)
        return found

    engine.loop_ms(STEPS)
    pairs = in_turns(ROUNDS, lambda: engine.loop_ms(STEPS), bare)
    return {"pairs": pairs, "host": engine.host_us(HOST_STEPS)}


@torch.inference_mode()
def measure_many(model: DecoderModel, rows: int) -> dict[str, Any]:
    """Of some launches of many steps; none where there can be no loops, with the reason printed."""
    engine = SteadyEngine(model, rows, PROMPT, steps_ahead(AUTO, rows) * (LAUNCHES + 2), AUTO)
    if engine.core._loops.impossible:
        print("no loops:", engine.core._loops.impossible, flush=True)
        return {"many": []}
    engine.many_us(1)
    return {"many": engine.many_us(LAUNCHES)}


def measure_all(shapes: list[str], counts: list[int]) -> dict[tuple[str, int], dict[str, Any]]:
    """By shape and requests. One engine lives at a time; what is traced comes last, since a profiler leaves every later
    launch in the process slower."""
    found: dict[tuple[str, int], dict[str, Any]] = {(shape, count): {} for shape in shapes for count in counts}
    for measurements in ((measure, measure_many), (trace_gaps,)):
        for shape in shapes:
            model = random_model(shape, device="cuda", dtype=torch.bfloat16, max_positions=8192)
            for count, measurement in product(counts, measurements):
                found[shape, count] |= measurement(model, count)
                gc.collect()
                torch.cuda.empty_cache()
            del model
    return found


def line(shape: str, count: int, found: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The row of a number of requests, and which bars it is over."""
    loop, bare = (statistics.median(pair[i] for pair in found["pairs"]) for i in (0, 1))
    host, gap = quantiles(found["host"]), quantiles(found["gaps"])
    many, many_host = (
        statistics.median(sample[i] for sample in found["many"]) if found["many"] else None for i in (0, 1)
    )
    row = [
        count, loop, bare, "{:.3f} ({:.3f} to {:.3f})".format(*ratio(found["pairs"])), host["p10"], host["median"],
        host["p90"], statistics.mean(found["host"]), gap["median"], gap["p90"], many and many / 1e3, many_host,
    ]  # fmt: skip
    wrong = []
    if host["median"] > HOST_BARS.get(count, host["median"]):
        wrong.append(f"{shape}, {count}: the host takes {host['median']:.1f} µs, over {HOST_BARS[count]}")
    if many_host is None or many_host > MANY_BAR:
        wrong.append(f"{shape}, {count}: with many steps a launch the host takes {many_host} µs a token")
    if gap["median"] > GAP_BAR:
        wrong.append(f"{shape}, {count}: the device idles {gap['median']:.1f} µs, over {GAP_BAR}")
    return row, wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="llama-3-8b,llama-3.2-1b")
    parser.add_argument("--rows", default="1,13,256")
    options = parser.parse_args()
    shapes, counts = options.shapes.split(","), [int(count) for count in options.rows.split(",")]
    measured, wrong = measure_all(shapes, counts), []
    for shape in shapes:
        rows, samples = [], {}
        for count in counts:
            samples[str(count)] = found = measured[shape, count]
            row, over = line(shape, count, found)
            rows.append(row)
            wrong += over
            print(shape, *row, flush=True)
        write_result(result(shape, rows, samples))
    print("; ".join(wrong) or "within the bars")
    return 1 if wrong else 0


def result(shape: str, rows: list[list[Any]], samples: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": re.sub(r"\W", "_", f"h200_steady_{shape}"),
        "definition": f"Greedy decoding of {shape}, random bfloat16 weights, prompts of {PROMPT} tokens. loop: a step "
        f"of the engine's loop of {STEPS}, by the host's clock, in turns with bare: the same graph replayed alone, by "
        "events. host: the host's time a step without waiting for the device. gap: what the device idles between "
        f"two steps, from a trace of torch's profiler. many: a step where many are one launch, "
        f"{steps_ahead(AUTO, 1)} of one request and {steps_ahead(AUTO, 256)} of many, by the host's clock, and the "
        "host's time a token without waiting.",
        "unit": "loop, bare, many: ms; host, gap: µs",
        "machine": machine(),
        "versions": versions("torch", "triton", "cuda-bindings"),
        "commit": commit(),
        "columns": [
            "requests", "loop", "bare", "loop / bare", "host p10", "host", "host p90", "host mean", "gap", "gap p90",
            "many", "many: host a token",
        ],
        "rows": rows,
        "samples": samples,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
