"""`stepgraph trace`: what the steps of any program did, by a trace of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import Json, one_line_errors


def trace_command(
    file: Annotated[
        Path,
        typer.Argument(help="A trace of torch.profiler (.json, .json.gz), or of Nsight Systems exported as SQLite."),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Part of the annotation's, kernel's or call's name that begins a step. Default: found."
        ),
    ] = None,
    gpu: Annotated[int | None, typer.Option(help="Which of the trace's GPUs. Default: the busiest.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the steps and the kernels into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Account for the steps in a trace of any program, vLLM and SGLang among them. Needs no GPU."""
    with one_line_errors(), _no_collection():
        run_trace(file, step=step, gpu=gpu, picture=picture, as_json=as_json)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A trace is millions of objects without a cycle among them: to look for one takes longer than all the rest."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_trace(file: Path, *, step: str | None, gpu: int | None, picture: Path | None, as_json: bool) -> None:
    """Read, account, draw and print. Raises StepgraphError for a trace or an option that cannot work."""
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.measure.trace.launches import on_gpu
    from stepgraph.measure.trace.loop import account_for
    from stepgraph.measure.trace.picture import draw
    from stepgraph.measure.trace.read import read_any
    from stepgraph.measure.trace.result import trace_result

    if picture is not None:
        require_picture(picture)
    whole = read_any(file)
    mine, chosen = on_gpu(whole, gpu)
    account = account_for(mine, step)
    if picture is not None:
        draw(picture, account)
    show(trace_result(file, whole, mine, chosen, account), as_json=as_json)
