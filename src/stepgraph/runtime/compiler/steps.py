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
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.naming import describe

MOST_AT_RUN_TIME = 8
"""Batches that run without graphs and were compiled while serving; torch's own limit of recompilations."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileTotal:
    """What compiling has taken so far.

    steps: sizes that were compiled. pieces: in all of them. distinct: pieces that were compiled, the others being the
    same as one of these. seconds: in all, with the traces.
    """

    backend: str
    steps: int
    pieces: int
    distinct: int
    seconds: float


class CompiledSteps:
    """Runs a step in compiled pieces.

    run: the step itself, on the rows of a batch or key. backend: of torch's compiler, by name. at_run_time: told the
    seconds of each compilation while serving.

    A size is compiled when it is first seen. As in a recording, of the step's Python only its breaks run from then on.
    """

    def __init__(
        self, run: Callable[[BatchDescriptor], Any], backend: str, at_run_time: Callable[[float], None]
    ) -> None:
        self._run, self._told = run, at_run_time
        self._compiler = PieceCompiler(backend)
        self._programs: dict[BatchDescriptor, Program] = {}
        self._served: set[BatchDescriptor] = set()
        self._steps = 0
        self._seconds = 0.0
        self._said_enough = False

    def __call__(self, batch: BatchDescriptor) -> Any:
        """The step on a batch or key. The first call of each also compiles it; it runs once all the same.

        Raises:
            CaptureError: the step did what a piece cannot hold, or a piece does not compile.
        """
        program = self._programs.get(batch)
        if program is not None:
            return program()
        result, error = self._compile(batch)
        if error is not None:
            raise error
        return result

    def serve(self, batch: BatchDescriptor) -> Any:
        """The step of a batch that no graph runs: compiled at first sight, which is counted and said, for up to
        MOST_AT_RUN_TIME batches; others, and those that do not compile, run as they are.

        Raises:
            CaptureError: the step did what a piece cannot hold.
        """
        program = self._programs.get(batch)
        if program is not None:
            return program()
        if batch in self._served or len(self._served) >= MOST_AT_RUN_TIME:
            if batch not in self._served and not self._said_enough:
                self._said_enough = True
                _log.warning("%d batches were compiled while serving; further ones run uncompiled", MOST_AT_RUN_TIME)
            return self._run(batch)
        self._served.add(batch)
        before = self._seconds
        result, error = self._compile(batch)
        seconds = self._seconds - before
        self._told(seconds)
        what = f"{batch.num_tokens} tokens, {describe(batch)},"
        if error is None:
            _log.warning("a step of %s was compiled while serving: %.2f s", what, seconds)
        else:
            _log.warning("a step of %s runs uncompiled: %s", what, error)
        return result

    def total(self) -> CompileTotal:
        compiler = self._compiler
        return CompileTotal(compiler.backend, self._steps, compiler.pieces, compiler.compiled, self._seconds)

    def forget(self) -> None:
        """Let go of the tensors that the pieces hold. What was compiled stays, for the next capture."""
        self._programs = {}
        self._served = set()

    def _compile(self, batch: BatchDescriptor) -> tuple[Any, CaptureError | None]:
        """What a traced call of the step returned, and why it did not compile."""
        started = time.perf_counter()
        traced, result = trace(lambda: self._run(batch))
        try:
            self._programs[batch] = Program(traced, self._compiler)
        except CaptureError as error:
            return result, error
        finally:
            self._seconds += time.perf_counter() - started
        self._steps += 1
        return result, None
