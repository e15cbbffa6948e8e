"""Sampling as a chain of seven launches, as serving engines had it before it was fused: for comparison with `sample`.

Penalties, temperature, top-k (with min-p), top-p, softmax, draw, gather; each in a region of its own. In plain torch,
sorting whole rows, on a CPU, and in Triton on a GPU.
"""

import math
from typing import Any

import torch

from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.philox import gumbel, uniform_rows
from stepgraph.ops.sampling.reference import GREEDY_BELOW
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.regions import region

_LARGEST = torch.finfo(torch.float32).max


def sample_chain(logits: torch.Tensor, *tensors: torch.Tensor, **optional: Any) -> None:
    """Choose one token a row: the arguments, and all but roundings of the results, are `sample`'s.

    Safe to capture. Raises ConfigError on CUDA where triton is not installed.
    """
    if logits.device.type != "cuda":
        _chain(logits, *tensors, **optional)
        return
    try:
        from stepgraph.ops.sampling.triton_chain import chain_triton  # a CPU machine may lack triton
    except ImportError as error:
        raise ConfigError(f"sampling on cuda: the triton package does not load ({error}); install triton") from error
    chain_triton(logits, *tensors, **optional)


def _chain(
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
    """The truth for `chain_triton`; sizes do not depend on data, so that a tape can hold it too."""
    penalties = Penalties.given(repetition_penalty, presence_penalty, frequency_penalty, seen)
    draws = (temperature >= GREEDY_BELOW)[:, None]  # the others leave the chain's filters alone
    with region("penalties"):
        x = logits.float() if penalties is None else penalties.apply(logits)
    with region("temperature"):
        x = (x / torch.where(draws, temperature[:, None], 1.0)).nan_to_num(-math.inf, _LARGEST, -math.inf)
    with region("top_k"):
        if min_p is not None:
            floor = x.amax(-1, keepdim=True) + min_p[:, None].log().clamp(max=0)
            x = x.masked_fill(draws & (min_p[:, None] > 0) & (x < floor), -math.inf)
        last = (top_k.long() - 1).clamp(0, x.shape[1] - 1)[:, None]
        kth = x.sort(descending=True).values.gather(1, last)
        x = x.masked_fill(draws & (top_k[:, None] > 0) & (x < kth), -math.inf)
    with region("top_p"):
        ordered = x.sort(descending=True).values
        mass = (ordered - ordered[:, :1]).double().exp().cumsum(-1)
        short = (mass < top_p[:, None] * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=x.shape[1] - 1)
        x = x.masked_fill(draws & (top_p[:, None] < 1) & (x < ordered.gather(1, short)), -math.inf)
    with region("softmax"):
        probability = x.softmax(-1)
    with region("draw"):
        scores = torch.where(draws, probability.log() + gumbel(uniform_rows(seed, position, x.shape[1])), x)
    with region("gather"):
        out.copy_(scores.nan_to_num(-math.inf, math.inf, -math.inf).argmax(-1))  # a row of -inf has no softmax
        if penalties is not None:
            penalties.note(out)
