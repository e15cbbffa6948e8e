"""What every benchmark shares: the instruments' statistics and clock, and the folder of the result files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.measure.clock import device_ms
from stepgraph.measure.machine import ROOT, commit, machine, versions
from stepgraph.measure.result import write_result as write_into
from stepgraph.measure.stats import in_turns, quantiles, ratio

__all__ = ["RESULTS", "ROOT", "commit", "device_ms", "in_turns", "machine", "quantiles", "ratio", "versions"]
__all__ += ["write_result"]

RESULTS = ROOT / "benchmarks" / "results"


def write_result(result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `result` as NAME.json, whole or not at all."""
    return write_into(result, folder)
