"""The grammar of the commands that measure a decode step: `stepgraph census`, `bench`, `padding`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import Attention, Graphs, Json, Operations, Where, not_empty, one_line_errors


class SamplerName(StrEnum):
    FUSED = "fused"
    CHAIN = "chain"


Model = Annotated[
    str | None,
    typer.Argument(
        help="A shape such as llama-3-8b, a directory, a GGUF file, or a hub id. Default: the demo model.",
        callback=not_empty,
    ),
]


def census_command(
    model: Model = None,
    step: Annotated[
        str | None,
        typer.Option(help="FILE.py:FUNCTION or MODULE:FUNCTION; called without arguments, it returns the step."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Requests that decode.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each of them attends to.")] = 512,
    device: Where = None,
    operations: Operations = None,
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


def bench_command(
    model: Model = None,
    rows: Annotated[int, typer.Option(help="Requests that decode at once.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    tokens: Annotated[int, typer.Option(help="Decode steps of each engine that are timed.")] = 64,
    rounds: Annotated[int, typer.Option(help="Engines of each kind, in turns.")] = 4,
    graphs: Annotated[Graphs, typer.Option(help="The graphs that are compared with none, as for `run`.")] = (
        Graphs.VLLM_FULL_DECODE_ONLY
    ),
    device: Where = None,
    attention: Attention = None,
    operations: Operations = None,
    picture: Annotated[Path | None, typer.Option(help="Draw how long steps took into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Time per output token with graphs on and off, one engine at a time, host and device apart."""
    with one_line_errors():
        from stepgraph.cli.bench import BenchOptions, run_bench

        run_bench(
            BenchOptions(
                model=model,
                rows=rows,
                prompt=prompt,
                tokens=tokens,
                rounds=rounds,
                graphs=graphs.value,
                device=None if device is None else device.value,
                attention=attention,
                operations=operations,
                picture=picture,
                as_json=as_json,
            )
        )


def padding_command(
    model: Model = None,
    run: Annotated[Path | None, typer.Option(help="What `stepgraph run --json` printed: say what it paid.")] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Measure nothing; take the latency curve that --json printed earlier.")
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Sizes that are padded and exact in turns. Default: 9:16,300:304.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(help="Largest size of the curve. Default: 512, on a CPU 16.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that each row attends to. Default: 512.")] = None,
    device: Where = None,
    attention: Attention = None,
    operations: Operations = None,
    prometheus: Annotated[bool, typer.Option(help="Print the run's padding in Prometheus' text format.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the curve and the run's padding into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Say what padded rows cost in time: a step's latency curve, padded beside exact graphs, and what a run paid."""
    with one_line_errors():
        from stepgraph.cli.padding import PaddingOptions, run_padding

        run_padding(
            PaddingOptions(
                model=model,
                run=run,
                curve=curve,
                pairs=pairs,
                max_rows=max_rows,
                context=context,
                device=None if device is None else device.value,
                attention=attention,
                operations=operations,
                prometheus=prometheus,
                picture=picture,
                as_json=as_json,
            )
        )
