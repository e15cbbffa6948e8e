"""The demo model on a GPU: graphs against eager token by token, and what a step costs the host.

python benchmarks/h200_replay.py [--model FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
from common import commit, in_turns, machine, quantiles, ratio, versions, write_result

from stepgraph import LLM, SamplingParams
from stepgraph.engine.demo import demo_model_path
from stepgraph.runtime import BatchDescriptor

PROMPTS = [line for line in (Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").splitlines() if line]
ROWS, CALLS = 13, 500


def host_seconds(call: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Host time of each call, the device idle when it starts."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def compare_tokens(model: Path) -> tuple[LLM, LLM, int, int]:
    """The two engines, the requests compared and how many of them gave the same tokens."""
    graphs = LLM(model, device="cuda", max_num_seqs=ROWS, max_model_len=1024)
    eager = LLM(model, device="cuda", graphs="disabled", max_num_seqs=ROWS, max_model_len=1024)
    texts = islice(cycle(PROMPTS), 39)
    prompts = [graphs.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    equal = total = 0
    for params in (
        SamplingParams(temperature=0, max_tokens=64),
        SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=64, seed=11),
    ):
        got, expected = ([o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (graphs, eager))
        equal += sum(a == b for a, b in zip(got, expected, strict=True))
        total += len(prompts)
    return graphs, eager, total, equal


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    model = options.model or demo_model_path()
    graphs, eager, total, equal = compare_tokens(model)
    print(f"{equal} of {total} requests gave the same tokens; captured in {graphs.capture_report.seconds:.2f} s")

    runner = graphs.core.runner
    runner.buffers.reset()
    key = BatchDescriptor.decode(16)
    recording = runner.graph(key).recording
    names = {"temperature": [0.0] * ROWS, "top_k": [0] * ROWS, "top_p": [1.0] * ROWS, "seed": list(range(ROWS))}
    figures = {
        "launch of one graph (`replay()`)": host_seconds(recording.replay),
        "`runner()`, nothing changed": host_seconds(lambda: runner(num_requests=ROWS)),
        "`runner()`, four slots staged": host_seconds(lambda: runner(num_requests=ROWS, **names)),
        "the same step, eager": host_seconds(lambda: eager.core.runner(num_requests=ROWS, **names), 100),
    }
    rows = []
    for name, seconds in figures.items():
        q = quantiles([s * 1e6 for s in seconds])
        rows.append([name, q["median"], q["p10"], q["p90"]])
        print(rows[-1])

    def wall(llm: LLM) -> float:
        started = time.perf_counter()
        llm.core.runner(num_requests=ROWS)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    pairs = in_turns(60, lambda: wall(eager), lambda: wall(graphs))
    speed, low, high = ratio(pairs)
    print(f"step: eager / graph {speed:.2f} ({low:.2f} to {high:.2f})")
    rows.append(["whole step, graph", *(quantiles([b * 1e6 for _, b in pairs])[k] for k in ("median", "p10", "p90"))])
    rows.append(["whole step, eager", *(quantiles([a * 1e6 for a, _ in pairs])[k] for k in ("median", "p10", "p90"))])
    write_result(
        {
            "name": "h200_replay",
            "definition": f"SmolLM2-135M in bfloat16, 13 rows padded to 16. Host time of a call with the device idle "
            "(`the same step, eager` with four slots staged); "
            f"a whole step ends when the device does. Eager / graph, paired: {speed:.2f} ({low:.2f} to {high:.2f}). "
            f"{equal} of {total} requests (greedy and sampled, 64 tokens) gave the same tokens with graphs and eager.",
            "unit": "µs",
            "machine": machine(),
            "versions": versions("torch", "triton"),
            "commit": commit(),
            "columns": ["what", "median", "p10", "p90"],
            "rows": rows,
            "samples": {**figures, "whole step (eager, graph)": pairs},
        }
    )
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
