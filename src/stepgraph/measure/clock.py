"""How long a call takes: the device by its events, the host by its clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def device_ms(
    step: Callable[[], object], count: int, *, before: Callable[[], object] | None = None, warm: int = 3
) -> list[float]:
    """Milliseconds between an event before and one after each call, as the device sees them.

    The calls follow each other without a wait, so that a graph's launch is queued before the device is free. `before`
    runs in front of each, outside the interval. The first `warm` calls are left out.
    """
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(warm + count)]
    torch.cuda.synchronize()
    for start, stop in spans:
        if before is not None:
            before()
        start.record()
        step()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in spans[warm:]]


def host_us(
    call: Callable[[], object], count: int, *, before: Callable[[], object] | None = None, warm: int = 3
) -> list[float]:
    """Microseconds of the host for each call, the device idle when it starts; what the device does later is not in it.

    `before` runs in front of each, outside the interval. The first `warm` calls are left out.
    """
    spans = []
    for _ in range(warm + count):
        if before is not None:
            before()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter_ns()
        call()
        spans.append((time.perf_counter_ns() - started) / 1e3)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return spans[warm:]
