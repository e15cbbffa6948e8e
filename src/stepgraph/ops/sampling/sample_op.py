"""`sample`: one custom operator, torch on the CPU and Triton on a GPU."""

from typing import Any

import torch

from stepgraph.ops.sampling.reference import sample_reference
from stepgraph.runtime.errors import ConfigError


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> None:
    """Choose one token a row, and write it to `out`. In vLLM's order: penalties, temperature, min-p, top-k, top-p.

    Args:
        logits: [rows, vocab], float32, bfloat16 or float16, contiguous within a row.
        temperature: float32 [rows]. 0 (or under 2**-17): the largest logit, the lowest index of equals.
        top_k: int32 [rows]. Keeps the tokens that reach the k-th largest logit, equals included; off where <= 0.
        top_p: float32 [rows]. Of the softmax over those, keeps the fewest most likely tokens whose mass reaches it,
            equals included, at least one; off where >= 1.
        seed: int64 [rows].
        position: int64 [rows], where the token that the new one follows stands in its text. Seed and position alone
            decide the noise.
        out: int64 [rows].
        min_p: float32 [rows]. Keeps the tokens that are at least this share as likely as the likeliest; off where
            <= 0.
        repetition_penalty: float32 [rows]. Divides positive logits of tokens in `seen`, multiplies others; 1 is off.
        presence_penalty, frequency_penalty: float32 [rows]. Taken off a token that stands in the output: once, and
            as often as it stands there. 0 is off.
        seen: int32 [rows, vocab], contiguous: twice the times a token stands in the row's output, plus 1 if it
            stands in its prompt. The token chosen is counted. Rows without a penalty neither read nor count.

    A NaN logit counts as -inf, a row without any other gives token 0. Every row gives a token of the vocabulary.
    Safe to capture: nothing is read on the host of a GPU, and no torch generator is used.
    Raises ConfigError for some of the penalties without the others, and on CUDA where triton is not installed.
    """
    penalties = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seen": seen,
    }
    absent = [name for name, value in penalties.items() if value is None]
    if 0 < len(absent) < len(penalties):
        raise ConfigError(f"sampling: penalties need {', '.join(penalties)} together; missing: {', '.join(absent)}")
    torch.ops.stepgraph.sample(logits, temperature, top_k, top_p, seed, position, out, min_p=min_p, **penalties)


def _sample_cuda(*tensors: torch.Tensor, **optional: Any) -> None:
    try:
        from stepgraph.ops.sampling.triton_sample import sample_triton  # a CPU machine may lack triton
    except ImportError as error:
        raise ConfigError(f"sampling on cuda: the triton package does not load ({error}); install triton") from error
    sample_triton(*tensors, **optional)


def _returns_nothing(*_: object, **__: object) -> None:
    """The fake form: it writes `out` and `seen` and returns nothing."""


torch.library.define(
    "stepgraph::sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor position, Tensor(a!) out, *,"
    " Tensor? min_p=None, Tensor? repetition_penalty=None, Tensor? presence_penalty=None,"
    " Tensor? frequency_penalty=None, Tensor(b!)? seen=None) -> ()",
)
torch.library.impl("stepgraph::sample", "cpu", sample_reference)
torch.library.impl("stepgraph::sample", "cuda", _sample_cuda)
torch.library.register_fake("stepgraph::sample", _returns_nothing)
