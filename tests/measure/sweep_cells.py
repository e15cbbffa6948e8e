"""What stands in for measuring a cell, importable by the processes that a sweep starts."""

from __future__ import annotations

import os
import signal
from typing import Any

from stepgraph.measure.sweep.cells import Cell, Work, label
from stepgraph.runtime.errors import ConfigError

WORK = Work("a model", "cpu", 32, 3)


def row(work: Work, cell: Cell, **more: Any) -> dict[str, Any]:
    """As `measure_row` makes it: 2 ms a row without graphs, 1 ms with them."""
    ms = cell.rows * (2.0 if cell.graphs == "disabled" else 1.0)
    found = {
        "resolved": {"decode": "full", "prefill": "full", "steps": {"FULL": 9}, "dtype": "float32", "changes": [],
                     "attention": cell.attention or "reference", "operations": "reference"},
        "capture": {"seconds": 0.5, "graphs": 1, "pool_bytes": 2**20, "driver_bytes": 0, "dropped": {}},
        "samples": {"host_us": [ms * 1e3] * 3, "latency_ms": [ms, ms * 0.9, ms * 1.1]},
        "machine": "a machine", "versions": {"python": "3"}, "commit": "c0ffee", "pid": os.getpid(),
    }  # fmt: skip
    return {**label(work, cell), "failed": None, **found, **more}


def measure(work: Work, cell: Cell) -> dict[str, Any]:
    """Does what the cell's attention says."""
    if cell.attention == "refuse":
        raise ConfigError("refused")
    if cell.attention == "break":
        raise RuntimeError("CUDA error: an illegal\nmemory access")
    if cell.attention == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.attention == "exit":
        os._exit(3)
    return row(work, cell)
