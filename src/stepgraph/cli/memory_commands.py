"""The grammar of `stepgraph memory` and `stepgraph plan memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import (
    Adapter,
    Attention,
    Compile,
    Compiler,
    DType,
    Graphs,
    Json,
    LadderOption,
    ModelOption,
    Operations,
    Where,
    not_empty,
    one_line_errors,
)
from stepgraph.cli.plan_ladder import plan_ladder_command


def memory_command(
    model: ModelOption = None,
    device: Where = None,
    graphs: Annotated[Graphs, typer.Option(help="What to capture, as for run.")] = Graphs.FULL,
    compile: Compile = Compiler.OFF,
    ladder: LadderOption = "vllm",
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations, as for run.")] = DType.AUTO,
    attention: Attention = None,
    operations: Operations = None,
    adapter: Adapter = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests decoded at once, at most.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the longest sequence.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A device's profile, whose prediction is shown beside.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the rows as a stack into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Load a model, capture its graphs, and say who has which bytes of memory."""
    with one_line_errors():
        from stepgraph.cli.memory import MemoryOptions, memory

        memory(
            MemoryOptions(
                model=model,
                device=None if device is None else device.value,
                graphs=graphs.value,
                compile=compile.value,
                ladder=ladder,
                dtype=dtype.value,
                attention=attention,
                operations=operations,
                adapter=adapter,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                profile=profile,
                picture=picture,
                as_json=as_json,
            )
        )


plan_app = typer.Typer(help="Predict what is not there yet.", no_args_is_help=True, rich_markup_mode=None)


@plan_app.callback()
def plan_root() -> None:
    """Predict what is not there yet."""


@plan_app.command("memory")
def plan_memory_command(
    model: Annotated[
        str, typer.Argument(help="A directory, a GGUF file, or a shape such as llama-3-8b.", callback=not_empty)
    ],
    profile: Annotated[Path | None, typer.Option(help="A device's profile. Default: that of the H200.")] = None,
    graphs: Annotated[Graphs, typer.Option(help="What is captured, as for run.")] = Graphs.FULL,
    compile: Compile = Compiler.OFF,
    ladder: LadderOption = "vllm",
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations.")] = DType.BFLOAT16,
    adapter: Adapter = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests decoded at once, at most.")] = 256,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the longest sequence.")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a step that prefills.")] = 512,
    memory_fraction: Annotated[float, typer.Option(help="Of the device's memory, for everything.")] = 0.9,
    as_json: Json = False,
) -> None:
    """Say what an engine will take on a device, and what is left for its KV cache, before anything is captured."""
    with one_line_errors():
        from stepgraph.cli.plan import PlanOptions, plan

        plan(
            PlanOptions(
                model=model,
                profile=profile,
                graphs=graphs.value,
                compile=compile.value,
                ladder=ladder,
                dtype=dtype.value,
                adapter=adapter,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                chunk_tokens=chunk_tokens,
                memory_fraction=memory_fraction,
                as_json=as_json,
            )
        )


plan_app.command("ladder")(plan_ladder_command)
