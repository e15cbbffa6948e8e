"""What ladders are fitted with: a decode step's time by captured size with hardly any context, and what context adds.

python benchmarks/h200_ladder_curve.py

Half a minute. The result's `curve` is what `stepgraph plan ladder` takes; the one in the package
(src/stepgraph/measure/ladder_fit/curves) is a copy.
"""

from __future__ import annotations

import statistics

import torch
from common import commit, in_turns, machine, quantiles, versions, write_result

from stepgraph.engine.random_model import random_model
from stepgraph.measure.curve import ON_THE_DEVICE, LatencyCurve, measure_curve, step_ms
from stepgraph.measure.decode import DecodeRows
from stepgraph.runtime import GraphConfig, Ladder

SHAPE, ROUNDS = "llama-3-8b", 2
SIZES = [*range(1, 65), *range(68, 257, 4), *range(264, 513, 8)]  # where ladders have their sizes, and those between
ROWS, CONTEXT, PAIRS = 128, 1025, 12  # of the steps that tell what a token of context adds


def decoding(model: object, sizes: list[int], context: int) -> DecodeRows:
    graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(sizes), warmups=0)
    decode = DecodeRows(model, graphs, rows=max(sizes), context=context)
    decode.core.capture()
    return decode


@torch.inference_mode()
def main() -> None:
    model = random_model(SHAPE, device="cuda", dtype=torch.bfloat16, max_positions=CONTEXT + 1)
    decode = decoding(model, SIZES, 1)
    made_of = f"{model.operations.name} operations, {decode.core.attention.name} attention"
    curve = measure_curve(decode, SIZES, f"{SHAPE} ({made_of}), H200, no context; {ON_THE_DEVICE}", rounds=ROUNDS)
    long = decoding(model, [ROWS], CONTEXT)
    for one in (decode, long):
        one.stage(ROWS)
    pairs = in_turns(PAIRS, *(lambda one=one: statistics.median(step_ms(one, 5)) for one in (long, decode)))
    token_ns = [(a - b) * 1e6 / (ROWS * (CONTEXT - 1)) for a, b in pairs]
    write_result(result(curve, token_ns))


def result(curve: LatencyCurve, token_ns: list[float]) -> dict[str, object]:
    a_token = quantiles(token_ns)["median"]
    shown = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size in curve.medians]
    return {
        "name": "h200_ladder_curve",
        "definition": f"Time of a decode step by the size that it was captured for: {curve.what}. {len(curve.sizes)} "
        f"sizes in one process, of which some are shown. A token of a real row's context adds {a_token:.1f} ns, "
        f"measured with {ROWS} rows at contexts of {CONTEXT} and 1, in turns.",
        "unit": "ms",
        "machine": machine(),
        "versions": versions("torch", "triton", "cuda-bindings"),
        "commit": commit(),
        "columns": ["rows", "median", "p10", "p90"],
        "rows": [[size, *(quantiles(curve.samples[size])[q] for q in ("median", "p10", "p90"))] for size in shown],
        "curve": {**curve.to_json(), "token_ns": a_token},
        "samples": {"token_ns": token_ns},
    }


if __name__ == "__main__":
    main()
