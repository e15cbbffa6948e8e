"""Greedy tokens of the `fused` operations on the demo model, judged by the `reference` operations in float32.

    python benchmarks/fused_parity.py [--device cuda] [--operations fused] [--model FILE] [--prompts 20]

Every token is judged after the prefix that it was chosen for: by how much the judge prefers another one. In float32
that may be a thousandth of a logit; in half precision, whose weights differ, a near-tie.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, versions, write_result
from reference import PROMPTS

from stepgraph import LLM, SamplingParams
from stepgraph.engine.demo import demo_model_path
from stepgraph.engine.kv_blocks import allocate_cache, blocks_for
from stepgraph.engine.model import attention_shape
from stepgraph.ops.attention import get_backend

NEAR = {"float32": 1e-3, "bfloat16": 0.5}  # logits


class Judge:
    """The model of an LLM by the reference operations, a whole text at once."""

    def __init__(self, llm: LLM) -> None:
        self._model = llm.core.model
        self._attention = get_backend("reference", self._model.device, attention_shape(self._model.config))

    @torch.inference_mode()
    def gaps(self, prompt: list[int], answer: list[int]) -> list[float]:
        """For each token of the answer, how far its logit is below the largest one."""
        model, text = self._model, torch.tensor(prompt + answer, device=self._model.device)
        count = len(text)
        tables = torch.arange(1, blocks_for(count) + 1, dtype=torch.int32, device=text.device)[None]
        lengths = torch.tensor([count], dtype=torch.int32, device=text.device)
        start = torch.tensor([0, count], dtype=torch.int32, device=text.device)
        cache = allocate_cache(model.config, blocks_for(count) + 1, model.dtype, model.device)

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self._attention.prefill(q, kv, tables, lengths, start, out)

        places = torch.arange(count, device=text.device)
        hidden = model.forward(text, places, tables.expand(count, -1), cache, attend)
        logits = model.logits(hidden[len(prompt) - 1 : -1])
        chosen = logits.gather(1, text[len(prompt) :, None]).squeeze(1)
        return (logits.max(dim=1).values - chosen).tolist()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--operations", default="fused")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False

    def engine(dtype: str, operations: str, graphs: str) -> LLM:
        return LLM(
            options.model or demo_model_path(), device=options.device, dtype=dtype, operations=operations,
            graphs=graphs, max_num_seqs=13, max_model_len=512,
        )  # fmt: skip

    exact = engine("float32", "reference", "disabled")
    judge = Judge(exact)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [exact.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS[: options.prompts]]
    truth = [output.outputs[0].token_ids for output in exact.generate(prompts, params)]
    rows: list[list[Any]] = []
    samples = {}
    for dtype, near in NEAR.items():
        llm = engine(dtype, options.operations, "full")
        for name, calls in (("13 at once", [prompts]), ("one by one", [[prompt] for prompt in prompts])):
            got = [output.outputs[0].token_ids for call in calls for output in llm.generate(call, params)]
            gaps = [gap for case in zip(prompts, got, strict=True) for gap in judge.gaps(*case)]
            equal = sum(a == b for a, b in zip(truth, got, strict=True))
            ties, errors = sum(0 < gap <= near for gap in gaps), sum(not gap <= near for gap in gaps)
            rows.append([dtype, name, len(prompts), equal, ties, errors, max(gaps)])
            samples[f"{dtype}, {name}"] = got
            print(*rows[-1], flush=True)
        del llm
    write_result(
        {
            "name": f"{options.device}_{options.operations}_parity",
            "definition": f"Greedy tokens of {options.prompts} requests x {options.tokens} of the demo model by the "
            f"`{options.operations}` operations, in full graphs. Identical: to those of the reference operations in "
            "float32, which also judge each token after its own prefix. A tie: another token is preferred by at most "
            f"{NEAR['float32']} logits in float32, {NEAR['bfloat16']} in bfloat16.",
            "unit": "requests; ties and errors in tokens; logits",
            "machine": machine(),
            "versions": versions("torch", "triton"),
            "commit": commit(),
            "columns": ["dtype", "batch", "requests", "identical", "ties", "errors", "largest gap"],
            "rows": rows,
            "samples": samples,
        }
    )
    return 1 if any(row[5] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
