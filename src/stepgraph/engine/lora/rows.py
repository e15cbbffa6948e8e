"""Which adapter each row of a batch has: the step's slots for it, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.engine.lora.slots import LoraSlots
from stepgraph.engine.request import Request
from stepgraph.runtime.slots import PaddingPolicy, Slot


def adapter_slots() -> list[Slot]:
    """A row's adapter by its number in the batch and by where it lies; see `LoraRows`. Padded rows have none."""
    return [
        Slot("lora_index", torch.int32, "request", PaddingPolicy.FILL_SENTINEL, pad_value=-1),
        Slot("lora_slot", torch.int32, "request", PaddingPolicy.ZERO),
    ]


def adapter_inputs(requests: Sequence[Request], slots: LoraSlots) -> tuple[dict[str, Any], int]:
    """The values of `adapter_slots`, one entry a request, and how many adapters are active."""
    active: dict[str, int] = {}
    index, where = np.full(len(requests), -1, dtype=np.int32), np.zeros(len(requests), dtype=np.int32)
    for row, request in enumerate(requests):
        if request.adapter is not None:
            index[row] = active.setdefault(request.adapter, len(active))
            where[row] = slots.slot(request.adapter)
    return {"lora_index": index, "lora_slot": where}, len(active)
