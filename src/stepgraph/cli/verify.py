"""`stepgraph verify`: replay every graph of a model's engine against eager, on random batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.cli.options import (
    Adapter,
    Attention,
    Compile,
    Compiler,
    DType,
    Graphs,
    Json,
    ModelOption,
    Operations,
    Where,
    one_line_errors,
)

if TYPE_CHECKING:
    from stepgraph.engine import graphs as engine_graphs


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command line; None where the default depends on the machine or the model."""

    model: str | None = None
    device: str | None = None
    graphs: engine_graphs.Graphs = "full"
    compile: str = "off"
    dtype: str = "auto"
    attention: str | None = None
    operations: str | None = None
    adapter: Path | None = None
    rtol: float = 0.0
    atol: float = 0.0
    as_json: bool = False


def verify_command(
    model: ModelOption = None,
    device: Where = None,
    graphs: Annotated[Graphs, typer.Option(help="The graphs to verify, as for `run`.")] = Graphs.FULL,
    compile: Compile = Compiler.OFF,
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations, as for run.")] = DType.AUTO,
    attention: Attention = None,
    operations: Operations = None,
    adapter: Adapter = None,
    rtol: Annotated[
        float, typer.Option(help="How far a replay may be from eager, of its value: inductor rounds otherwise.")
    ] = 0.0,
    atol: Annotated[float, typer.Option(help="The same, whatever the value.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Replay every graph against eager on random batches, and name the first operator that differs."""
    with one_line_errors():
        agrees = verify(
            VerifyOptions(
                model=model,
                device=None if device is None else device.value,
                graphs=graphs.value,
                compile=compile.value,
                dtype=dtype.value,
                attention=attention,
                operations=operations,
                adapter=adapter,
                rtol=rtol,
                atol=atol,
                as_json=as_json,
            )
        )
        if not agrees:
            raise typer.Exit(1)


def verify(options: VerifyOptions) -> bool:
    """Print what agrees and what differs; returns whether all agrees.

    Raises:
        StepgraphError: a model, device or adapter that cannot work, or no graphs to verify.
    """
    from stepgraph.cli.adapter import load_into, room_for
    from stepgraph.cli.console import ProgressBar, write
    from stepgraph.engine import LLM
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.naming import count
    from stepgraph.runtime.verify.compare import Tolerance

    Tolerance(options.rtol, options.atol)  # before the model, which takes a while
    lora = room_for(options.adapter)
    with ProgressBar(quiet=options.as_json) as progress:
        llm = LLM(
            options.model if options.model is not None else demo_model_path(),
            device=options.device,
            dtype=options.dtype,
            graphs=options.graphs,
            compile=options.compile,
            attention=options.attention,
            operations=options.operations,
            lora=lora,
            progress=progress,
        )
    load_into(llm, options.adapter)
    if not llm.capture_report.graphs:
        raise ConfigError(
            f"verify: --graphs {options.graphs} captures nothing here; choose full, breakable or another mode"
        )
    if not options.as_json:
        number = count(len(llm.capture_report.graphs), "graph")
        typer.echo(f"verifying {number} against eager; on a CPU this takes minutes", err=True)
    with ProgressBar(quiet=options.as_json) as progress:
        report = llm.verify(rtol=options.rtol, atol=options.atol, progress=progress)
    write(f"{json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if options.as_json else report}\n")
    return report.ok
