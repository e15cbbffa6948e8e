"""Whether a row of a sweep's file has what the result is made of: somebody may have edited it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TEXTS = ("decode", "prefill", "attention", "operations")
_NUMBERS = ("graphs", "pool_bytes", "seconds")
_CLOCKS = ("host_us", "latency_ms")


def require_row(row: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError: a field is missing, or is of another kind."""
    for name in ("machine", "commit"):
        _require(row[name], str, name)
    for name in ("graphs", "compile"):
        _require(row["cell"].get(name, ""), str, name)
    _require(row["cell"]["rows"], int, "rows")
    _require_number(row["cell"]["rows"], "rows", 1)
    _require(row["versions"], dict, "versions")
    if row["failed"]:
        _require(row["failed"], str, "failed")
        return
    resolved, capture, samples = row["resolved"], row["capture"], row["samples"]
    for name in _TEXTS:
        _require(resolved[name], str, name)
    _require(resolved["steps"], dict, "steps")
    _require(resolved["changes"], list, "changes")
    for name in _NUMBERS:
        _require_number(capture[name], name, 0)
    _require(capture["dropped"], dict, "dropped")
    if capture.get("compile") is not None:
        _require_number(capture["compile"]["seconds"], "seconds of the compiler", 0)
    clocks = (*_CLOCKS, "device_ms") if row["work"]["device"] == "cuda" else _CLOCKS
    for name in (*clocks, *samples):
        taken = samples[name]
        _require(taken, list, name)
        if not taken:
            raise ValueError(f"{name} is empty")
        for sample in taken:
            _require_number(sample, name, 1e-12)


def _require(value: object, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.40}")


def _require_number(value: object, name: str, least: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.40}")
    if not least <= value <= 1e18 or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.40}")
