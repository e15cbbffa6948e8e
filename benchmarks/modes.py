"""Every way to run a step gives the tokens of eager: the demo model, 200 requests that join, leave and share steps.

    python benchmarks/modes.py [--device cpu] [--dtype float32] [--model FILE] [--requests 200]

Prompts of 1 to 200 tokens, answers of 1 to 32, half of them sampled, 16 at once: most steps with prefill in them
decode other requests too.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from common import commit, machine, versions, write_result

from stepgraph import LLM, SamplingParams
from stepgraph.engine.demo import demo_model_path

WAYS = ("disabled", "full", "breakable", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
ROWS, CHUNK, MAX_LEN = 16, 128, 256


def requests(count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts, params = [], []
    for index in range(count):
        length = rng.choice([1, 2, rng.randint(3, 40), rng.randint(41, 200)])
        prompts.append([rng.randrange(vocab) for _ in range(length)])
        sampled = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0}
        params.append(SamplingParams(max_tokens=rng.randint(1, 32), ignore_eos=True, **sampled))
    return prompts, params


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    expected: list[list[int]] = []
    rows, routes, failed = [], {}, 0
    for way in WAYS:
        llm = LLM(
            options.model or demo_model_path(),
            device=options.device,
            dtype=options.dtype,
            graphs=way,
            max_num_seqs=ROWS,
            max_model_len=MAX_LEN,
            chunk_tokens=CHUNK,
        )
        prompts, params = requests(options.requests, llm.config.vocab_size)
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        expected = expected or tokens
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        stats = llm.stats
        modes, reasons = stats.by_mode(), stats.by_reason()
        if sum(modes.values()) != stats.steps or sum(reasons.values()) != stats.steps:
            failed += 1
        failed += options.requests - equal
        routes[way] = stats.as_dict()
        told = ", ".join(f"{name} {count}" for name, count in sorted(modes.items()))
        why = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
        mixed = sum(route["steps"] for route in stats.routes() if route["kind"] == "mixed")
        rows.append([way, equal, stats.steps, mixed, told, why, llm.capture_report.seconds])
        print(rows[-1], flush=True)
        del llm
    write_result(
        {
            "name": f"{options.device}_modes_{options.dtype}",
            "definition": f"Tokens of {options.requests} requests (prompts of 1 to 200 tokens, answers of 1 to 32, "
            f"half of them sampled) on the demo model in {options.dtype}, {ROWS} at once: how many are those that the "
            "same engine gives without graphs, and how the steps ran.",
            "unit": "requests, steps, seconds",
            "machine": machine(),
            "versions": versions("torch"),
            "commit": commit(),
            "columns": ["graphs", "identical", "steps", "with prefill", "modes", "reasons", "capture s"],
            "rows": rows,
            "samples": routes,
        }
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
