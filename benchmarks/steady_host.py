"""Python's time in a steady decode step, with graphs that hold nothing: without a GPU.

python benchmarks/steady_host.py
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from common import commit, machine, quantiles, versions, write_result
from steady import SteadyEngine

from stepgraph.engine.random_model import SHAPES, random_model

STEPS = 320  # twenty times the steps between two writes to the block tables
TINY = replace(
    SHAPES["llama-3.2-1b"],
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position_embeddings=1024,
)
BARS = {13: 15.0, 256: 60.0}  # µs


def main() -> None:
    model = random_model(TINY, device="cpu", dtype=torch.float32, max_positions=1024)
    rows, samples = [], {}
    for count in BARS:
        engine = SteadyEngine(model, count, 8, STEPS + 64)
        for graph in engine.core.runner.capture_report.graphs.values():
            graph.recording.release()  # a tape that was released replays nothing
        engine.host_us(32)
        samples[str(count)] = engine.host_us(STEPS)
        found = quantiles(samples[str(count)])
        rows.append([count, *found.values(), statistics.mean(samples[str(count)])])
        print(rows[-1], flush=True)
    write_result(
        {
            "name": "steady_host",
            "definition": "The host's time of a steady decode step, everything but computing and detokenising: launch, "
            "mark, read the tokens of the step before, hand them to the requests' texts. The recordings hold nothing. "
            "The mean has the steps in which blocks are given, one of sixteen.",
            "unit": "µs",
            "machine": machine(),
            "versions": versions("torch"),
            "commit": commit(),
            "columns": ["requests", "p10", "median", "p90", "mean"],
            "rows": rows,
            "samples": samples,
        }
    )


if __name__ == "__main__":
    main()
