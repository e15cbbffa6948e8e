"""`sample`: one custom operator, torch on the CPU and Triton on a GPU."""

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
) -> None:
    """Choose one token a row, and write it to `out`.

    Args:
        logits: [rows, vocab], float32, bfloat16 or float16, contiguous within a row.
        temperature: float32 [rows]. 0 (or under 2**-17): the largest logit, the lowest index of equals.
        top_k: int32 [rows]. Keeps the tokens that reach the k-th largest logit, equals included; off where <= 0.
        top_p: float32 [rows]. Of the softmax over those, keeps the fewest most likely tokens whose mass reaches it,
            equals included, at least one; off where >= 1.
        seed: int64 [rows].
        position: int64 [rows], the place of the new token in its text. Seed and position alone decide the noise.
        out: int64 [rows].

    A NaN logit counts as -inf, a row without any other gives token 0. Every row gives a token of the vocabulary.
    Safe to capture: nothing is read on the host of a GPU, and no torch generator is used.
    Raises ConfigError on CUDA where triton is not installed.
    """
    torch.ops.stepgraph.sample(logits, temperature, top_k, top_p, seed, position, out)


def _sample_cuda(*tensors: torch.Tensor) -> None:
    try:
        from stepgraph.ops.sampling.triton_sample import sample_triton  # a CPU machine may lack triton
    except ImportError as error:
        raise ConfigError(f"sampling on cuda: the triton package does not load ({error}); install triton") from error
    sample_triton(*tensors)


def _returns_nothing(*_: object) -> None:
    """The fake form: it writes `out` and returns nothing."""


torch.library.define(
    "stepgraph::sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor position, Tensor(a!) out)"
    " -> ()",
)
torch.library.impl("stepgraph::sample", "cpu", sample_reference)
torch.library.impl("stepgraph::sample", "cuda", _sample_cuda)
torch.library.register_fake("stepgraph::sample", _returns_nothing)
