"""The rows of a sweep as one result: a table, what failed and why, latency curves, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from stepgraph.measure.curve import ON_THE_DEVICE, ON_THE_HOST, LatencyCurve
from stepgraph.measure.result import Result, Rows
from stepgraph.measure.sweep.cells import EAGER, Cell, Work, compiled_graphs, key_of
from stepgraph.runtime.config import Compile

Row = Mapping[str, Any]

CONFIGURATION = "graphs as asked for, + what compiles the step; attention and operations as they ran"
TIMES = ("configuration", "rows", "host µs", "device ms", "p50 ms", "p90 ms", "p99 ms", "eager / this")
OF_TIMES = {
    "configuration": CONFIGURATION,
    "rows": "requests that decode at once, in a graph of exactly that size",
    "host µs": "median time of the host for a call with the device idle: its submission; without a GPU the whole step",
    "device ms": "median from an event before the step to one behind it, steps queued behind each other; what the "
    "device waited for the host within an eager step is in it",
    "p50 ms": "latency: from the call, the device idle, until the device is done; p90 and p99 the same",
    "eager / this": "median latency of the same cell without graphs, not compiled, over this one's",
}
CAPTURES = ("configuration", "rows", "decode", "prefill", "ran", "graphs", "pool MiB", "capture s", "compile s")
OF_CAPTURES = {
    "configuration": CONFIGURATION,
    "decode": "the backend of its graphs after what the attention backend allows; prefill the same",
    "ran": "how the timed steps ran",
    "graphs": "recorded for the cell, those of prefill included",
    "pool MiB": "device memory that their pool took",
    "capture s": "for all of them, their warm-ups and compilations included",
    "compile s": "of torch's compiler, with its traces; faster where its cache has a piece from an earlier cell",
}
_NO_GPU = (
    "Without a GPU the host computes the steps, the tape stands for a graph, and the device has no time of its own."
)


def sweep_result(rows: Sequence[Row]) -> Result:
    """rows: of one sweep, at least one."""
    done, failed = [row for row in rows if not row["failed"]], [row for row in rows if row["failed"]]
    work, _ = key_of(dict(rows[0]))
    tables = [
        Rows("times", TIMES, [_times(row, done) for row in done], OF_TIMES),
        Rows("captures", CAPTURES, [_capture(row) for row in done], OF_CAPTURES),
    ]
    if failed:
        columns = ["graphs", "attention", "operations", "rows", "reason"]
        reasons = [[*_asked(key_of(dict(row))[1]), row["failed"]] for row in failed]
        tables.append(Rows("failed cells", columns, reasons, {"reason": "what ended the cell; the others went on"}))
    curves = [curve.to_json() for curve in latency_curves(done).values()]
    first = (done or failed)[0]
    return Result(
        name="sweep",
        definition=f"Greedy decode steps of {_name(work)}, {work.context} tokens of context a row, {work.steps} steps "
        f"a cell and clock, one cell at a time on a {'GPU' if work.device == 'cuda' else 'machine'}.",
        tables=tables,
        notes=_notes(rows, done, work),
        more={"curves": curves, "cells": list(rows), **({"curve": curves[0]} if len(curves) == 1 else {})},
        machine=first["machine"],
        versions=first["versions"],
        commit=first["commit"],
    )


def latency_curves(done: Sequence[Row]) -> dict[str, LatencyCurve]:
    """Step time by rows, for each configuration that was measured; `plan ladder` and `padding --curve` read one."""
    samples: dict[str, dict[int, list[float]]] = {}
    for row in done:
        work, cell = key_of(dict(row))
        clock, taken = (
            (ON_THE_DEVICE, row["samples"]["device_ms"])
            if work.device == "cuda"
            else (ON_THE_HOST, row["samples"]["latency_ms"])
        )
        what = f"{_name(work)}, {configuration(row)}, {work.context} tokens of context a row; {clock}"
        samples.setdefault(what, {})[cell.rows] = taken
    return {what: LatencyCurve(by_rows, what) for what, by_rows in samples.items()}


def latency_lines(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """(rows, median ms of latency) of each configuration; what a picture of the sweep shows."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row["failed"]:
            point = (row["cell"]["rows"], median(row["samples"]["latency_ms"]))
            lines.setdefault(configuration(row), []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """A PNG: latency by rows, a line for each configuration.

    Raises:
        ConfigError: it cannot be written.
    """
    from stepgraph.measure.picture import new_picture, save_picture

    picture = new_picture(9, 5)
    axes = picture.subplots()
    for name, points in latency_lines(rows).items():
        axes.plot(*zip(*points, strict=True), ".-", label=name)
    axes.set(xlabel="rows", ylabel="ms a step, median", title="latency of a decode step", ylim=(0, None))
    if axes.lines:
        axes.legend()
    save_picture(picture, path)


def _times(row: Row, done: Sequence[Row]) -> list[Any]:
    samples = row["samples"]
    p50, p90, p99 = np.quantile(samples["latency_ms"], (0.5, 0.9, 0.99)).tolist()
    eager = [other for other in done if _is_eager_of(other, row)]
    return [
        configuration(row),
        row["cell"]["rows"],
        median(samples["host_us"]),
        median(samples["device_ms"]) if "device_ms" in samples else None,
        p50,
        p90,
        p99,
        median(eager[0]["samples"]["latency_ms"]) / p50 if eager else None,
    ]


def _capture(row: Row) -> list[Any]:
    resolved, capture = row["resolved"], row["capture"]
    compiled = capture.get("compile")  # not in files of earlier versions
    return [
        configuration(row),
        row["cell"]["rows"],
        resolved["decode"],
        resolved["prefill"],
        ", ".join(resolved["steps"]),
        capture["graphs"],
        capture["pool_bytes"] / 2**20,
        capture["seconds"],
        compiled and compiled["seconds"],
    ]


def _is_eager_of(other: Row, row: Row) -> bool:
    """Whether `other` is what the row is compared with, and not the row itself."""
    same = ("attention", "operations")
    return (
        other is not row
        and _graphs(other) in EAGER
        and other["cell"]["rows"] == row["cell"]["rows"]
        and other["machine"] == row["machine"]
        and all(other["resolved"][name] == row["resolved"][name] for name in same)
    )


def _notes(rows: Sequence[Row], done: Sequence[Row], work: Work) -> list[str]:
    notes = [_NO_GPU] if work.device != "cuda" else []
    for name in ("machine", "commit"):
        found = list(dict.fromkeys(row[name] for row in rows))
        if len(found) > 1:
            notes.append(f"Cells of more than one {name}: {', '.join(found)}; each cell in the file has its own.")
    notes += dict.fromkeys(
        f"changed, {_graphs(row)}: {change}" for row in done for change in row["resolved"]["changes"]
    )
    notes += [
        f"{key_of(dict(row))[1]}: the graph of {key} was dropped: {why}"
        for row in done
        for key, why in row["capture"]["dropped"].items()
    ]
    return notes


def configuration(row: Row) -> str:
    """Of a row that has figures: its graphs as asked for, its attention and operations as they ran."""
    return f"{_graphs(row)}, {row['resolved']['attention']}, {row['resolved']['operations']}"


def _graphs(row: Row) -> str:
    return compiled_graphs(row["cell"]["graphs"], row["cell"].get("compile", Compile.OFF))


def _asked(cell: Cell) -> list[Any]:
    return [
        compiled_graphs(cell.graphs, cell.compile),
        cell.attention or "its own",
        cell.operations or "its own",
        cell.rows,
    ]


def _name(work: Work) -> str:
    return work.model or "the demo model"
