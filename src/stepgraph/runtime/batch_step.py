"""The step on the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers


@dataclass
class BatchStep:
    """Calls the step with the views of a batch or key. Knows no runner: a runner that nobody holds any more goes at
    once, and its graphs' memory with it, without waiting for the garbage collector.

    request_slots: see `StaticBuffers.views`. with_loras: whether the step is told how many adapters may be active.
    """

    step: Callable[..., Any]
    buffers: StaticBuffers
    request_slots: int | None
    with_loras: bool

    def __call__(self, batch: BatchDescriptor) -> Any:
        views = self.buffers.views(batch, self.request_slots)
        return self.step(**views, num_loras=batch.num_loras) if self.with_loras else self.step(**views)
