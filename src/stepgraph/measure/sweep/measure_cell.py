"""One cell measured: an engine core is made, captures, decodes under three clocks, and goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from stepgraph.engine.graphs import graph_config
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.scheduler import most_tokens
from stepgraph.measure.clock import device_ms, host_us
from stepgraph.measure.decode import DecodeRows, load_model
from stepgraph.measure.machine import commit, machine, versions
from stepgraph.measure.sweep.cells import EAGER, Cell, Work, label
from stepgraph.measure.sweep.one_gpu import alone_on
from stepgraph.ops.operations import choose_operations
from stepgraph.runtime.config import Compile
from stepgraph.runtime.errors import CaptureError, StepgraphError
from stepgraph.runtime.ladder import Ladder

WARM = 3
"""Steps in front of each clock that are not counted."""


def measure_row(work: Work, cell: Cell) -> dict[str, Any]:
    """The cell's row, with where it was measured. Raises whatever goes wrong."""
    operations = choose_operations(cell.operations, work.device, compiled=cell.compile != Compile.OFF)
    with alone_on(work.device):
        started = time.perf_counter()
        found = measure_cell(_loaded.get(work, operations), work, cell)
        took = time.perf_counter() - started
    where = {"machine": machine(), "versions": versions(), "commit": commit(), "seconds": took}
    return {**label(work, cell), "failed": None, **found, **where}


def failed_row(work: Work, cell: Cell, reason: str) -> dict[str, Any]:
    """A row of a cell that has no figures."""
    where = {"machine": machine(), "versions": versions(), "commit": commit()}
    return {**label(work, cell), "failed": " ".join(reason.split()), **where}


def reason_of(error: Exception) -> str:
    """In words: our own errors as they are, others with their type."""
    return str(error) if isinstance(error, StepgraphError) else f"{type(error).__name__}: {error}"


@torch.inference_mode()
def measure_cell(model: DecoderModel, work: Work, cell: Cell) -> dict[str, Any]:
    """What was resolved, what the capture took, and the samples of each clock.

    Raises:
        StepgraphError: what was asked for cannot run here.
    """
    config = graph_config(
        cell.graphs,
        None if cell.graphs in EAGER else Ladder.explicit([cell.rows]),
        max_num_seqs=cell.rows,
        step_tokens=most_tokens(1, cell.rows),
        device=model.device,
        compile=cell.compile,
    )
    decode = DecodeRows(model, config, rows=cell.rows, context=work.context, attention=cell.attention)
    try:
        report = decode.core.capture()
        decode.stage(cell.rows)
        before = decode.runner.stats.by_mode()
        samples = _sample(decode, work)
        resolution, modes = decode.core.resolution, decode.runner.stats.by_mode()
        costs = [graph.cost for graph in report.graphs.values()]
        compiled = decode.runner.compile_total()
        if compiled is not None and not compiled.steps:
            raise CaptureError(f"{cell.compile} compiled no step; what was timed ran as it is")
        return {
            "resolved": {
                "decode": resolution.config.decode.backend.value,
                "prefill": resolution.config.prefill.backend.value,
                "steps": {mode: n - before.get(mode, 0) for mode, n in modes.items() if n > before.get(mode, 0)},
                "attention": decode.core.attention.name,
                "operations": model.operations.name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "changes": [str(change) for change in resolution.changes],
            },
            "capture": {
                "seconds": report.seconds,
                "graphs": len(report.graphs),
                "pool_bytes": decode.runner.pool.nbytes(),
                "driver_bytes": sum(cost.driver_bytes for cost in costs),
                "compile": None if compiled is None else asdict(compiled),
                "dropped": {str(key): why for key, why in report.dropped.items()},
            },
            "samples": samples,
        }
    finally:
        decode.runner.release()
        del decode
        gc.collect()


def _sample(decode: DecodeRows, work: Work) -> dict[str, list[float]]:
    """By clock; without a GPU the device has none."""
    found = {"host_us": host_us(decode.step, work.steps, before=decode.rewind, warm=WARM)}
    if work.device == "cuda":
        found["device_ms"] = device_ms(decode.step, work.steps, before=decode.rewind, warm=WARM)
        found["latency_ms"] = _latency_ms(decode.step, work.steps, decode.rewind)
    else:
        found["latency_ms"] = [us / 1e3 for us in found["host_us"]]
    return found


def _latency_ms(step: Callable[[], object], count: int, before: Callable[[], object]) -> list[float]:
    """From a call with the device idle until the device is done."""
    spans = []
    for _ in range(WARM + count):
        before()
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        spans.append((time.perf_counter() - started) * 1e3)
    return spans[WARM:]


class _Loaded:
    """The model of this process's last cell: cells that share it load it once, and there is never a second one."""

    def __init__(self) -> None:
        self._key: tuple[Work, str] | None = None
        self._model: DecoderModel | None = None

    def get(self, work: Work, operations: str) -> DecoderModel:
        if self._key != (work, operations) or self._model is None:
            self._key = self._model = None
            gc.collect()
            if work.device == "cuda":
                torch.cuda.empty_cache()
            self._model = load_model(work.model, device=work.device, max_len=work.context + 1, operations=operations)
            self._key = (work, operations)
        return self._model


_loaded = _Loaded()
