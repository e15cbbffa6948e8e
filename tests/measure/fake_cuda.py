"""Events and a profiler that answer as a GPU would, so that the loop around a step can run without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measure.traces import graph_step

PROFILED_US = 43.4
"""Of a step by events with the profiler on; a little more than by its trace."""


class FakeEvent:
    def __init__(self, log: list[str], plain_us: float) -> None:
        self._log, self._plain_us = log, plain_us
        self._us = 0.0

    def record(self) -> None:
        profiled = self._log.count("profiler on") > self._log.count("profiler off")
        self._us = PROFILED_US if profiled else self._plain_us

    def elapsed_time(self, stop: FakeEvent) -> float:
        return stop._us / 1e3


class FakeProfiler:
    """Its trace holds a graph's step for every step that ran while it was on."""

    def __init__(self, log: list[str], lost: int = 0) -> None:
        self._log, self._lost = log, lost
        self._first = self._steps = 0

    def __enter__(self) -> FakeProfiler:
        self._log.append("profiler on")
        self._first = len(self._log)
        return self

    def __exit__(self, *_: Any) -> None:
        self._log.append("profiler off")
        self._steps = self._log[self._first :].count("step") - self._lost

    def export_chrome_trace(self, path: str) -> None:
        events = [event for i in range(self._steps) for event in graph_step(1000.0 * i, 10 * i)]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, lost: int = 0, plain_us: float = PROFILED_US) -> list[str]:
    """Put the fakes in place. Returns a log of what is called.

    lost: steps that the profiler misses. plain_us: of a step by events with the profiler off.
    """
    log: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("sync"))
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: FakeEvent(log, plain_us))
    monkeypatch.setattr("torch.profiler.profile", lambda activities: FakeProfiler(log, lost))
    return log
