"""A step in pieces: runs them and the breaks between them, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.compiler.build import Compiled, PieceCompiler
from stepgraph.runtime.compiler.pieces import Ref, Span, Trace, TracedBreak, TracedPiece
from stepgraph.runtime.platforms.tape.opaque import opaque
from stepgraph.runtime.regions import region

Values = dict[Ref, torch.Tensor]
Instruction = Callable[[Values], None]


class Program:
    """What a trace was compiled to. Called like the step, with the tensors that it was traced with.

    Breaks are breaks as in the step, and each piece is one record of a tape.

    Raises:
        CaptureError: a piece does not compile.
    """

    def __init__(self, trace: Trace, compiler: PieceCompiler) -> None:
        last = _last_uses(trace)
        self._result = trace.result
        self._instructions: list[tuple[Instruction, list[Ref]]] = []
        pieces = 0
        for index, part in enumerate(trace.parts):
            done = [ref for ref, use in last.items() if use == index]
            if isinstance(part, TracedBreak):
                self._instructions.append((_call_break(part), done))
            elif part.work or part.outputs:
                self._instructions.append((_call_piece(part, compiler.compile(part), f"piece.{pieces}"), done))
                pieces += 1

    def __call__(self) -> Any:
        values: Values = {}
        for run, done in self._instructions:
            run(values)
            for ref in done:
                values.pop(ref, None)
        return tree_map_only(Ref, values.__getitem__, self._result)


def _call_piece(piece: TracedPiece, compiled: Compiled, name: str) -> Instruction:
    inputs, refs = piece.inputs, [ref for _, ref in piece.outputs]

    def run_compiled(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with _disable_current_modes():  # they would see operators that only the compiler knows
            return list(compiled(*tensors))

    run_compiled.__qualname__ = name  # what the tape calls it
    call = opaque(run_compiled)

    def run(values: Values) -> None:
        with region(name):
            made = call(*[_bring(one, values) for one in inputs])
        values.update(zip(refs, made, strict=True))

    return run


def _bring(one: Ref | Span | torch.Tensor, values: Values) -> torch.Tensor:
    if isinstance(one, torch.Tensor):
        return one
    return values[one] if isinstance(one, Ref) else one.within(values[one.of])


def _call_break(part: TracedBreak) -> Instruction:
    call = graph_break(part.function, name=part.name)

    def run(values: Values) -> None:
        args, kwargs = tree_map_only(Ref, values.__getitem__, (part.args, part.kwargs))
        leaves = tree_leaves(call(*args, **kwargs))
        for ref, leaf in zip(part.results, leaves, strict=True):
            if ref is not None:
                values[ref] = leaf

    return run


def _last_uses(trace: Trace) -> dict[Ref, int]:
    """By tensor that the step makes and does not return: the last part that makes or uses it."""
    last: dict[Ref, int] = {}
    for index, part in enumerate(trace.parts):
        if isinstance(part, TracedBreak):
            used = [*tree_flatten((part.args, part.kwargs))[0], *part.results]
        else:
            sources = [one.of if isinstance(one, Span) else one for one in part.inputs]
            used = [*sources, *(ref for _, ref in part.outputs)]
        last.update({ref: index for ref in used if isinstance(ref, Ref)})
    for ref in tree_leaves(trace.result):
        if isinstance(ref, Ref):
            last.pop(ref, None)
    return last
