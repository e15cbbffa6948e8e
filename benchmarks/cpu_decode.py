"""Decode on a CPU: the tape against our own eager step, and our decode against transformers'. Paired, in turns.

python benchmarks/cpu_decode.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle, islice

from common import commit, in_turns, machine, quantiles, ratio, versions, write_result
from reference import PROMPTS, Reference

from stepgraph import LLM, SamplingParams
from stepgraph.engine.demo import demo_model_path
from stepgraph.runtime import Ladder

SHORT, LONG = 8, 40  # tokens; the difference of the two runs is decode alone


def per_step(generate: Callable[[int], float]) -> Callable[[], float]:
    """Seconds of one decode step: the difference of a long and a short run over the steps between them."""
    return lambda: (generate(LONG) - generate(SHORT)) / (LONG - SHORT)


def ours(llm: LLM, prompts: list[list[int]]) -> Callable[[], float]:
    def generate(tokens: int) -> float:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - started

    return per_step(generate)


def theirs(reference: Reference, prompts: list[list[int]]) -> Callable[[], float]:
    return per_step(lambda tokens: reference.generate(prompts, tokens)[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path = demo_model_path()
    tape = LLM(path, device="cpu", ladder=Ladder.explicit([1, 16]), max_num_seqs=16, max_model_len=512)
    eager = LLM(path, device="cpu", graphs="disabled", max_num_seqs=16, max_model_len=512)
    reference = Reference(path)
    conversations = islice(cycle(PROMPTS), 16)
    prompts = [tape.chat_prompt([{"role": "user", "content": text}]) for text in conversations]
    one, thirteen = prompts[:1], prompts[:13]
    comparisons = [
        ("tape / our eager, 1 row", ours(tape, one), ours(eager, one)),
        ("tape / our eager, 16 rows", ours(tape, prompts), ours(eager, prompts)),
        ("padding: tape 13 → 16 / our eager, 13 rows", ours(tape, thirteen), ours(eager, thirteen)),
        ("ours (tape) / transformers, 1 row", ours(tape, one), theirs(reference, one)),
        ("ours (tape 13 → 16) / transformers, 13 rows", ours(tape, thirteen), theirs(reference, thirteen)),
    ]
    rows, samples = [], {}
    for name, a, b in comparisons:
        a(), b()  # warm up
        pairs = in_turns(options.rounds, a, b)
        speed, low, high = ratio([(theirs_s, ours_s) for ours_s, theirs_s in pairs])
        first, second = (quantiles([pair[i] * 1e3 for pair in pairs])["median"] for i in (0, 1))
        rows.append([name, first, second, speed, f"{low:.2f} to {high:.2f}"])
        samples[name] = pairs
        print(rows[-1], flush=True)
    write_result(
        {
            "name": "cpu_decode",
            "definition": "One decode step of SmolLM2-135M in float32: a run of 40 tokens less a run of 8, over the "
            "32 steps between. Times are medians. Speed is the median of the rounds' ratios, second over first, paired "
            "in turns, with a 95 % bootstrap interval; it need not be the ratio of the medians.",
            "unit": "ms a step",
            "machine": machine(),
            "versions": versions("torch", "transformers"),
            "commit": commit(),
            "columns": ["comparison", "first", "second", "speed", "interval"],
            "rows": rows,
            "samples": samples,
        }
    )


if __name__ == "__main__":
    main()
