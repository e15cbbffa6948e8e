"""The compiled forms of a runner's step, one for each batch that it was called with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.compiler.build import PieceCompiler
from stepgraph.runtime.compiler.program import Program
from stepgraph.runtime.compiler.trace import trace
from stepgraph.runtime.naming import describe

MOST_AT_RUN_TIME = 8
"""Batches that run without graphs and were compiled while serving; torch's own limit of recompilations."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileTotal:
    """What compiling has taken so far.

    steps: sizes that were compiled. pieces: in all of them. distinct: pieces that were compiled, the others being the
    same as one of these. seconds: in all. at_run_time: of `steps`, those compiled while serving; at_run_time_seconds:
    what these took.
    """

    backend: str
    steps: int
    pieces: int
    distinct: int
    seconds: float
    at_run_time: int
    at_run_time_seconds: float


class CompiledSteps:
    """Runs a step in compiled pieces.

    run: the step itself, on the rows of a batch or key. backend: of torch's compiler, by name.

    A size is compiled when it is first seen. As in a recording, of the step's Python only its breaks run from then on.
    """

    def __init__(self, run: Callable[[BatchDescriptor], Any], backend: str) -> None:
        self._run = run
        self._compiler = PieceCompiler(backend)
        self._programs: dict[BatchDescriptor, Program] = {}
        self._steps = self._at_run_time = self._live = 0
        self._seconds = self._at_run_time_seconds = 0.0
        self._said_enough = False

    def __call__(self, batch: BatchDescriptor) -> Any:
        """The step on a batch or key. The first call of each also compiles it; it runs once all the same."""
        program = self._programs.get(batch)
        if program is not None:
            return program()
        started = time.perf_counter()
        traced, result = trace(lambda: self._run(batch))
        self._programs[batch] = Program(traced, self._compiler)
        self._steps += 1
        self._seconds += time.perf_counter() - started
        return result

    def serve(self, batch: BatchDescriptor) -> Any:
        """The step of a batch that no graph runs: compiled at first sight, which is counted and said, for up to
        MOST_AT_RUN_TIME batches; others run as they are."""
        if batch in self._programs:
            return self._programs[batch]()
        if self._live >= MOST_AT_RUN_TIME:
            if not self._said_enough:
                self._said_enough = True
                _log.warning("%d batches were compiled while serving; further ones run uncompiled", self._live)
            return self._run(batch)
        started = time.perf_counter()
        result = self(batch)
        seconds = time.perf_counter() - started
        self._live += 1
        self._at_run_time += 1
        self._at_run_time_seconds += seconds
        _log.warning("a step of %s was compiled while serving: %.2f s", describe(batch), seconds)
        return result

    def total(self) -> CompileTotal:
        compiler = self._compiler
        return CompileTotal(
            compiler.backend,
            self._steps,
            compiler.pieces,
            compiler.compiled,
            self._seconds,
            self._at_run_time,
            self._at_run_time_seconds,
        )

    def forget(self) -> None:
        """Let go of the tensors that the pieces hold. What was compiled stays, for the next capture."""
        self._programs = {}
        self._live = 0
