"""What the sampler needs of the requests in a batch: slots, their values, and the tokens that rows have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.engine.request import Request
from stepgraph.ops.sampling import mark_seen
from stepgraph.runtime.buffers import PaddingPolicy, Slot
from stepgraph.runtime.platforms import Platform

_MAX_INT32 = 2**31 - 1  # a larger top_k keeps the whole vocabulary just the same


def sampling_slots(penalties_over: int | None) -> list[Slot]:
    """One slot for each argument of the sampler, by its name. Padded rows are greedy and ask for nothing.

    penalties_over: the vocabulary's size; None leaves penalties out. What rows have seen is the device's: the step
    counts the tokens it chooses.
    """
    zero, sentinel = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL
    slots = [
        Slot("temperature", torch.float32, "request", zero),
        Slot("top_k", torch.int32, "request", zero),
        Slot("top_p", torch.float32, "request", sentinel, pad_value=1.0),
        Slot("min_p", torch.float32, "request", zero),
        Slot("seed", torch.int64, "request", zero),
    ]
    if penalties_over is not None:
        slots += [
            Slot("repetition_penalty", torch.float32, "request", sentinel, pad_value=1.0),
            Slot("presence_penalty", torch.float32, "request", zero),
            Slot("frequency_penalty", torch.float32, "request", zero),
            # Nothing reads a row without a penalty, so that no tail need be reset: it is half a megabyte a row.
            Slot("seen", torch.int32, "request", PaddingPolicy.KEEP_PAD, (penalties_over,), owner="device"),
        ]
    return slots


def sampling_inputs(requests: Sequence[Request], *, penalties: bool = True) -> dict[str, Any]:
    """The values of the slots that the host owns, one entry a request."""
    params = [request.params for request in requests]
    inputs: dict[str, Any] = {
        "top_k": np.array([min(p.top_k, _MAX_INT32) for p in params], dtype=np.int32),
        "seed": np.array([request.seed for request in requests], dtype=np.int64),
    }
    names = ["temperature", "top_p", "min_p"]
    if penalties:
        names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    for name in names:
        inputs[name] = np.array([getattr(p, name) for p in params], dtype=np.float32)
    return inputs


def mark_rows(platform: Platform, seen: torch.Tensor, requests: Sequence[Request], rows: Sequence[int]) -> None:
    """Write what each request has seen to its row of `seen`, int32 [rows, vocab]; those without penalties are left."""
    for request, row in zip(requests, rows, strict=True):
        if request.params.penalises:
            tokens = platform.upload(torch.tensor(request.prompt + request.output, dtype=torch.int64))
            mark_seen(seen[row], *tokens.tensor_split([len(request.prompt)]))
