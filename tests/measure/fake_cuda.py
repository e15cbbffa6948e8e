"""Events and a profiler that answer as a GPU would, so that the loop around a step can run without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measure.traces import graph_step


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, stop: FakeEvent) -> float:
        return 0.0434


class FakeProfiler:
    """Its trace holds a graph's step for every step that ran while it was on."""

    def __init__(self, log: list[str], lost: int = 0) -> None:
        self._log, self._lost = log, lost
        self._first = self._steps = 0

    def __enter__(self) -> FakeProfiler:
        self._first = len(self._log)
        return self

    def __exit__(self, *_: Any) -> None:
        self._steps = self._log[self._first :].count("step") - self._lost

    def export_chrome_trace(self, path: str) -> None:
        events = [event for i in range(self._steps) for event in graph_step(1000.0 * i, 10 * i)]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, lost: int = 0) -> list[str]:
    """Put the fakes in place. lost: steps that the profiler misses. Returns a log of what is called."""
    log: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("sync"))
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.profiler.profile", lambda activities: FakeProfiler(log, lost))
    return log
