"""Faults that are put into a step on purpose, to see whether an account finds them."""

from __future__ import annotations

import time

import torch

from stepgraph.measure.account import Way


def host_stall(way: Way, us: float) -> Way:
    """The same way, but the host does nothing for so long before it begins."""

    def step() -> None:
        spin(us)
        way.step()

    return Way(f"{way.name}, {us:.0f} µs host stall", step, way.before)


def idle_break(way: Way, us: float) -> Way:
    """The step twice as one, and between the two the device is done and idles while the host does nothing."""

    def step() -> None:
        way.step()
        torch.cuda.current_stream().synchronize()
        spin(us)
        way.step()

    return Way(f"{way.name}, {us:.0f} µs idle break", step, way.before)


def spin(us: float) -> None:
    """Keep the host busy with nothing."""
    until = time.perf_counter_ns() + us * 1e3
    while time.perf_counter_ns() < until:
        pass
