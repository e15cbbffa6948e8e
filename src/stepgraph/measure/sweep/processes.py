"""Cells measured on this machine, one at a time, in processes that may die."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stepgraph.measure.sweep.cells import Cell, Work
from stepgraph.measure.sweep.measure_cell import failed_row, reason_of
from stepgraph.runtime.errors import ConfigError

Measure = Callable[[Work, Cell], dict[str, Any]]
"""A cell's row; `measure_row`, or what a test puts in its place."""


def run_in_processes(work: Work, cells: Sequence[Cell], measure: Measure, *, isolate: bool) -> Iterator[dict[str, Any]]:
    """A row for each cell, in order.

    One process measures all of a compile mode, so that the model is loaded once. A fresh one follows where it died, or
    after an error other than a refusal, which may have spoiled it for the rest. isolate: a process for each cell.
    """
    process: _Process | None = None
    mode: str | None = None
    try:
        for cell in cells:
            if process is not None and cell.compile != mode:
                process.end()
                process = None
            mode = cell.compile
            process = process or _Process(work, measure)
            row, fit = process.measure(cell)
            if isolate or not fit:
                process.end()
                process = None
            yield row
    finally:
        if process is not None:
            process.end()


class _Process:
    """A process that measures what it is sent."""

    def __init__(self, work: Work, measure: Measure) -> None:
        context = multiprocessing.get_context("spawn")  # a forked one could not use the device
        self._work = work
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, work, measure), daemon=True)
        self._process.start()
        there.close()

    def measure(self, cell: Cell) -> tuple[dict[str, Any], bool]:
        """The row, and whether the process is fit for another cell."""
        try:
            self._here.send(cell)
            row, fit = self._here.recv()
            return row, fit
        except (EOFError, OSError):
            self._process.join()
            return failed_row(self._work, cell, f"its process {_ended(self._process.exitcode)}"), False

    def end(self) -> None:
        """At once; a process that waits for a cell has nothing to lose."""
        self._here.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, work: Work, measure: Measure) -> None:
    """In the process: until the other side goes away, or an error may have spoiled what follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the other side's, which ends this one
    fit = True
    while fit:
        try:
            cell = connection.recv()
        except (EOFError, OSError):
            return
        try:
            row = measure(work, cell)
        except Exception as error:
            row, fit = failed_row(work, cell, reason_of(error)), isinstance(error, ConfigError)
        try:
            connection.send((row, fit))
        except OSError:
            return


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
