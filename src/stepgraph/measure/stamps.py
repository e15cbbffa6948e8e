"""A clock that is read inside a step: the device's own, by the first and the last thing that the step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.measure.account import WARM, Run, Way, events_us, trace_steps
from stepgraph.runtime.errors import ConfigError


class Stamped:
    """A step that writes the device's clock, in ns, before its first operation and after its last.

    Raises:
        ConfigError: there is no Triton.
    """

    def __init__(self, step: Callable[..., Any], device: torch.device) -> None:
        try:
            from stepgraph.measure.kernels import stamp
        except ImportError:
            raise ConfigError("a clock inside a step needs Triton; pip install triton") from None
        self._step, self._stamp = step, stamp
        self._stamps = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, *args: Any, **views: torch.Tensor) -> Any:
        self._stamp[(1,)](self._stamps, INDEX=0)
        result = self._step(*args, **views)
        self._stamp[(1,)](self._stamps, INDEX=1)
        return result

    def read_us(self) -> float:
        """Between the stamps of the last run; waits for it."""
        first, last = self._stamps.tolist()
        return (last - first) / 1e3


@dataclass(frozen=True)
class CrossCheck:
    """Of the same step, µs. plain: by the clock inside, without a profiler. profiled: with one. traced: in the same
    steps as `profiled`, from the start of the first activity to the end of the last, by the trace."""

    plain: Sequence[float]
    profiled: Sequence[float]
    traced: Sequence[float]


def cross_check(stamped: Stamped, step: Run, before: Run, count: int) -> CrossCheck:
    """step: runs `stamped`, such as a replay of a graph of it. before: as of a `Way`.

    Raises:
        TraceError: the profiler did not record the steps.
    """
    read: list[float] = []

    def read_the_last() -> None:
        read.append(stamped.read_us())
        before()

    way = Way("stamped", step, read_the_last)
    events_us(way, WARM + count)
    plain = [*read[1:], stamped.read_us()][WARM:]
    read.clear()
    steps, _ = trace_steps(way, count)
    profiled = [*read[1:], stamped.read_us()][WARM:]
    return CrossCheck(plain, profiled, [one.total - one.before_first for one in steps])
