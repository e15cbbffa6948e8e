"""The grammar of the commands that measure a decode step: `stepgraph census`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import Device, one_line_errors


class SamplerName(StrEnum):
    FUSED = "fused"
    CHAIN = "chain"


Model = Annotated[
    str | None,
    typer.Argument(help="A shape such as llama-3-8b, a directory, a GGUF file, or a hub id. Default: the demo model."),
]
Where = Annotated[Device | None, typer.Option(help="Where to run. Default: cuda where it works, else cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON and nothing else.")]


def census_command(
    model: Model = None,
    step: Annotated[
        str | None,
        typer.Option(help="FILE.py:FUNCTION or MODULE:FUNCTION; called without arguments, it returns the step."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Requests that decode.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each of them attends to.")] = 512,
    device: Where = None,
    operations: Annotated[
        str | None, typer.Option(help="What computes a layer: unfused or reference. Default: the device's own.")
    ] = None,
    sampler: Annotated[
        SamplerName, typer.Option(help="How tokens are chosen: fused, or step by step as a chain.")
    ] = SamplerName.FUSED,
    transformers: Annotated[
        bool, typer.Option(help="Have transformers run the directory's model, even if this engine could.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the operations into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Count what one decode step launches: the nodes of its graph, and the launches of an eager run."""
    with one_line_errors():
        from stepgraph.cli.census import CensusOptions, run_census

        run_census(
            CensusOptions(
                model=model,
                step=step,
                rows=rows,
                context=context,
                device=None if device is None else device.value,
                operations=operations,
                sampler=sampler.value,
                by_transformers=transformers,
                picture=picture,
                as_json=as_json,
            )
        )
