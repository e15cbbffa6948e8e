"""Greedy tokens against transformers: 20 prompts x 64 tokens, with and without graphs, batched and one by one.

    python benchmarks/parity.py [--prompts 20] [--tokens 64]

A token may differ where the reference's own preference is below 1e-3 logits; such ties are counted, and the rest
of that request is judged against the reference's choice after our prefix.
"""

from __future__ import annotations

import argparse
import sys

from common import commit, machine, versions, write_result
from reference import PROMPTS, Reference

from stepgraph import LLM, SamplingParams
from stepgraph.engine.demo import demo_model_path

TIE = 1e-3


def judge(reference: Reference, prompt: list[int], expected: list[int], got: list[int]) -> tuple[int, int]:
    """(ties, errors) of one request."""
    if got == expected:
        return 0, 0
    ties = errors = 0
    first = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    for position in range(first, len(got)):
        gap = reference.gap(prompt + got[:position], got[position])
        ties += 0 < gap < TIE
        errors += gap >= TIE
    return ties, errors


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    path = demo_model_path()
    reference = Reference(path)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    rows, samples, failed = [], {}, 0
    expected: list[list[int]] = []
    for graphs in ("full", "disabled"):
        llm = LLM(path, device="cpu", graphs=graphs, max_num_seqs=13, max_model_len=512)
        prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS[: options.prompts]]
        if not expected:
            expected = [reference.generate([prompt], options.tokens)[0][0] for prompt in prompts]
        for batched in (True, False):
            calls = [prompts] if batched else [[prompt] for prompt in prompts]
            outputs = [output for call in calls for output in llm.generate(call, params)]
            got = [output.outputs[0].token_ids for output in outputs]
            judged = [judge(reference, *case) for case in zip(prompts, expected, got, strict=True)]
            ties, errors = sum(t for t, _ in judged), sum(e for _, e in judged)
            equal = sum(a == b for a, b in zip(expected, got, strict=True))
            name = "13 at once" if batched else "one by one"
            rows.append([graphs, name, len(prompts), equal, ties, errors])
            samples[f"{graphs}, {name}"] = got
            failed += errors
            print(rows[-1], flush=True)
    write_result(
        {
            "name": "cpu_parity",
            "definition": f"Greedy tokens of {options.prompts} requests x {options.tokens} against transformers on "
            "the same float32 weights. A tie: ours is another token that the reference ranks within 0.001 logits of "
            "its own.",
            "unit": "requests; ties and errors in tokens",
            "machine": machine(),
            "versions": versions("torch", "transformers"),
            "commit": commit(),
            "columns": ["graphs", "batch", "requests", "identical", "ties", "errors"],
            "rows": rows,
            "samples": samples,
        }
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
