"""Every instrument on an H200, Llama-3-8B's shape: launch, census, account, bench, padding and the latency curve.

python benchmarks/h200_instruments.py [launch] [census] [account_1] [account_16] [account_512] [bench] [padding]

Three minutes for all of them. Each has a process of its own, since a profiler leaves launches slower in the one where
it ran, and writes its own files under benchmarks/results. They are printed as `stepgraph` prints them, and each says at
its end what is not as it should be.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from common import RESULTS

from stepgraph.engine.model import DecoderModel
from stepgraph.measure.account import Accounted
from stepgraph.measure.account_result import MOST_RESIDUAL, account_result
from stepgraph.measure.bench import Workload, bench
from stepgraph.measure.census import census
from stepgraph.measure.count_step import StepCount, census_result, count_step
from stepgraph.measure.curve import curve_result
from stepgraph.measure.decode import DecodeRows, load_model
from stepgraph.measure.decode_account import account_decode
from stepgraph.measure.launch import measure_launch
from stepgraph.measure.padded_pairs import CHAPTER
from stepgraph.measure.padding_result import measure_padding, padding_result
from stepgraph.measure.result import Result, write_result
from stepgraph.measure.show import show
from stepgraph.runtime import GraphConfig

SHAPE, CONTEXT, OPERATIONS = "llama-3-8b", 512, "unfused"
USUAL, A_LAYER = 330, 10  # launches of a step on one device, and of a layer, as they are usually counted
MOST_DILATION = {"eager": 1.03, "graph": 1.08}  # a traced step over the same one without a profiler
WORK = Workload(rows=1, prompt=CONTEXT, tokens=64, rounds=6)


def launch(model: DecoderModel) -> list[str]:
    keep(measure_launch("cuda"), "h200_launch")
    return []


@torch.inference_mode()
def count(model: DecoderModel, sampler: str) -> StepCount:
    decode = DecodeRows(model, GraphConfig(), rows=1, context=CONTEXT, sampler=sampler)
    decode.stage(1)
    return count_step(decode.bare, "cuda", decode.rewind)


def count_launches(model: DecoderModel) -> list[str]:
    """The chain samples in the seven launches that are usually counted; the engine's advance is in no such count."""
    wrong = []
    for sampler in ("chain", "fused"):
        counted = count(model, sampler)
        what = f"a step of 1 row at a context of {CONTEXT} of {SHAPE} ({OPERATIONS} operations, sampler {sampler})"
        keep(census_result(counted, what, "cuda"), f"h200_census_{sampler}")
        if counted.nodes is None or counted.launches is None:
            wrong.append(f"census, {sampler}: {counted.why_no_nodes or counted.why_no_launches}")
            continue
        for where, found in (("graph", census(counted.nodes)), ("eager", census(counted.launches))):
            own = found.own - found.around.get("advance", 0)
            if set(found.layers) != {A_LAYER}:
                wrong.append(f"census, {sampler}, {where}: {sorted(set(found.layers))} a layer, not {A_LAYER}")
            if sampler == "chain" and own != USUAL:
                wrong.append(f"census, {where}: {own} own launches without advancing, not {USUAL}")
    return wrong


def account(model: DecoderModel, rows: int) -> list[str]:
    done = account_decode(model, SHAPE, rows=rows, context=CONTEXT)
    result = account_result(done.what, done.found, floor=done.floor, check=done.check)
    keep(replace(result, more={**result.more, "limits": done.limits}), f"h200_account_{rows}")
    return [f"{rows} rows, {complaint}" for found in done.found for complaint in distrust(found)]


def distrust(found: Accounted) -> list[str]:
    """What makes the account of one way doubtful."""
    plain, profiled = statistics.median(found.plain), statistics.median(found.profiled)
    wrong = []
    if found.residual is None or abs(found.residual) > MOST_RESIDUAL * profiled:
        wrong.append(f"{found.name}: a residual of {found.residual} µs of {profiled:.0f}")
    if profiled / plain > MOST_DILATION[found.name]:
        wrong.append(f"{found.name}: the profiler makes the step {profiled / plain:.3f} times as long")
    return wrong


def time_tokens(model: DecoderModel) -> list[str]:
    for rows in (1, 16):
        keep(bench(model, replace(WORK, rows=rows), "FULL_DECODE_ONLY"), f"h200_bench_{rows}")
        let_go()
    return []


def pad(model: DecoderModel) -> list[str]:
    found = measure_padding(model, SHAPE, most=512, context=CONTEXT, pairs=CHAPTER)
    keep(curve_result(found.curve), "h200_curve")
    keep(padding_result(found.curve, measured=found), "h200_padding")
    falls = [
        (low, high)
        for low, high in zip(found.curve.sizes, found.curve.sizes[1:], strict=False)
        if found.curve.medians[high] < 0.95 * found.curve.medians[low]
    ]
    return [f"curve: more rows take less time: {falls}"] if falls else []


def keep(result: Result, name: str) -> None:
    result = replace(result, name=name)
    show(result, as_json=False)
    print("written:", write_result(result.to_json(), RESULTS), flush=True)


def let_go() -> None:
    """Of the last engine, whose cache is large."""
    gc.collect()
    torch.cuda.empty_cache()


INSTRUMENTS: dict[str, Callable[[DecoderModel], list[str]]] = {
    "launch": launch,
    "census": count_launches,
    **{f"account_{rows}": partial(account, rows=rows) for rows in (1, 16, 512)},
    "bench": time_tokens,
    "padding": pad,
}


def main(asked: list[str]) -> int:
    unknown = [name for name in asked if name not in INSTRUMENTS]
    if unknown:
        print(f"no such instrument: {', '.join(unknown)}; there are {', '.join(INSTRUMENTS)}", file=sys.stderr)
        return 2
    if len(asked) != 1:
        runs = [subprocess.run([sys.executable, __file__, name], check=False) for name in asked or INSTRUMENTS]
        return max(run.returncode for run in runs)
    started, longest = time.perf_counter(), max(CONTEXT + 1, WORK.longest)
    model = load_model(SHAPE, device="cuda", max_len=longest, operations=OPERATIONS)
    wrong = INSTRUMENTS[asked[0]](model)
    print(f"{asked[0]}: {time.perf_counter() - started:.0f} s; {'; '.join(wrong) or 'as it should be'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
