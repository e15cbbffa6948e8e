"""Where a request ends, as far as the device can see it, and where its tokens are told: the step's slots for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.engine.request import Request
from stepgraph.runtime.slots import PaddingPolicy, Slot

STOP_IDS = 8
"""Token ids a row that the device looks for. What a request has beyond them is found by the host, one step late."""


def ending_slots() -> list[Slot]:
    """`limits`, `stops` and `mailboxes` of `ops.advance`. Rows that are not told otherwise go on for ever."""
    return [
        Slot("limits", torch.int32, "request", PaddingPolicy.ZERO),
        Slot("stops", torch.int64, "request", PaddingPolicy.FILL_SENTINEL, (STOP_IDS,), pad_value=-1),
        Slot("mailboxes", torch.int32, "request", PaddingPolicy.ZERO),
    ]


def ending_inputs(requests: Sequence[Request]) -> dict[str, Any]:
    """The values of `ending_slots`, one entry a request."""
    stops = np.full((len(requests), STOP_IDS), -1, dtype=np.int64)
    for row, request in enumerate(requests):
        if request.stops:
            ids = sorted(request.stops)[:STOP_IDS]
            stops[row, : len(ids)] = ids
    return {
        "limits": np.array([request.limit for request in requests], dtype=np.int32),
        "stops": stops,
        "mailboxes": np.array([request.mailbox for request in requests], dtype=np.int32),
    }
