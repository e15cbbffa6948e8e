"""Hugging Face transformers on the same weights: the reference that tokens and times are held against."""

from __future__ import annotations

import time
from pathlib import Path

import torch

PROMPTS = [line for line in (Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").splitlines() if line]


class Reference:
    """transformers' model read from the same GGUF file, greedy."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        """Exactly `new_tokens` for each prompt, all in one batch, and the seconds that took."""
        width = max(len(prompt) for prompt in prompts)
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * len(pad) + [1] * (width - len(pad)) for pad in padding])
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
        return out[:, width:].tolist(), time.perf_counter() - started

    @torch.inference_mode()
    def gap(self, prefix: list[int], token: int) -> float:
        """By how much the reference prefers its own choice after `prefix` to `token`, in logits."""
        logits = self.model(torch.tensor([prefix])).logits[0, -1]
        return float(logits.max() - logits[token])
