"""Batches that ask for everything the samplers can do, with ties, infinities and tokens seen before."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.ops.sampling.reference import sample_reference

CHOICES: dict[str, tuple[torch.dtype, list[float]]] = {
    "temperature": (torch.float32, [0.0, 1.0, 0.7, 1.5, 0.3, float("nan"), 2.0, 0.05]),
    "top_k": (torch.int32, [0, -1, 5, 1, 50, 90, 10**6]),
    "top_p": (torch.float32, [1.0, 0.9, 0.8, 0.3, 0.05, 0.0, 0.999, 2.0]),
    "min_p": (torch.float32, [0.0, 0.0, 0.0, 0.05, 0.3, 1.0]),
    "repetition_penalty": (torch.float32, [1.0, 1.0, 1.3, 0.8, 2.0]),
    "presence_penalty": (torch.float32, [0.0, 0.0, 1.5, -0.5]),
    "frequency_penalty": (torch.float32, [0.0, 0.0, 0.7, -2.0]),
}


@dataclass(frozen=True)
class SamplingCase:
    """logits and the arguments of `sample` without `seen` and `out`."""

    logits: torch.Tensor
    seen: torch.Tensor
    arguments: dict[str, torch.Tensor]

    def run(self, sampler: Callable[..., None], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that a sampler chooses, and what was seen after it."""
        out, seen = torch.full((len(self.logits),), -1, device=self.logits.device), self.seen.clone()
        sampler(self.logits, out=out, seen=seen, **self.arguments, **options)
        return out, seen

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(sample_reference)

    def triton(self, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from stepgraph.ops.sampling.triton_sample import sample_triton

        return self.run(sample_triton, plan=plan)

    def to(self, device: torch.device) -> SamplingCase:
        moved = {name: value.to(device) for name, value in self.arguments.items()}
        return SamplingCase(self.logits.to(device), self.seen.to(device), moved)

    def row(self, row: int) -> SamplingCase:
        one = slice(row, row + 1)
        return SamplingCase(
            self.logits[one], self.seen[one], {name: value[one] for name, value in self.arguments.items()}
        )


def sampling_case(number: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> SamplingCase:
    """The same for the same number. In the first two rows everything is off but the temperature, and from the eighth
    on every second row is cut by top-k and by top-p and has no penalty.

    Every fifth number has odd logits in its first seven rows, where it has as many.
    """
    rng, noise = random.Random(number), torch.Generator().manual_seed(number)
    logits = torch.randn(rows, vocab, generator=noise)
    if number % 3 == 0:
        logits = (logits * 8).round() / 8  # ties, also at the edges of top-k and top-p
    logits *= [3.0, 0.02, 0.02, 20.0, 0.3][number % 5]  # where rows are flat, a cut one token off is soon seen
    if number % 4 == 1:
        logits = logits.bfloat16().float()
    if number % 5 == 0 and vocab > 5 and rows > 6:
        logits[1], logits[2, 0], logits[3, 1:], logits[4, :5] = float("nan"), float("inf"), float("-inf"), -0.0
        logits[5, vocab // 2 :] = float("-inf")
        logits[6, 3:] = -1e4  # far below what the histogram resolves
    columns = {
        name: torch.tensor([rng.choice(values) for _ in range(rows)], dtype=dtype)
        for name, (dtype, values) in CHOICES.items()
    }
    off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    for name, value in {"top_k": 0, "top_p": 1, "min_p": 0, **off}.items():
        columns[name][:2] = value
    for row in range(7, rows, 2):
        cut = {"temperature": 0.9, "top_k": rng.choice([20, 50, 90]), "top_p": rng.choice([0.1, 0.3, 0.8]), "min_p": 0}
        for name, value in {**cut, **off}.items():
            columns[name][row] = value
    seen = torch.randint(0, 8, (rows, vocab), generator=noise, dtype=torch.int32)
    seen *= (torch.rand(rows, vocab, generator=noise) < 0.2).int()
    columns["seed"] = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=noise)
    columns["position"] = torch.randint(0, 2**40, (rows,), generator=noise)
    return SamplingCase(logits.to(dtype), seen, columns)
