"""The command line's grammar. Each command parses its options, calls one function, and turns errors into one line.

Exit codes: 0 done, 1 `env` found something that cannot work, `verify` a wrong replay, no cell of a `sweep` could be
measured, or a rank was killed, 2 wrong use or bad input, 130 interrupted, 141 whoever read the output went away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from stepgraph import __version__
from stepgraph.cli.account import account_command
from stepgraph.cli.launch import launch_command
from stepgraph.cli.memory_commands import memory_command, plan_app
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
    one_line_errors,
)
from stepgraph.cli.ranks import leave_at_once
from stepgraph.cli.report import report_command
from stepgraph.cli.step_commands import bench_command, census_command, padding_command
from stepgraph.cli.sweep import sweep_command
from stepgraph.cli.trace import trace_command
from stepgraph.cli.tune import tune_app
from stepgraph.cli.verify import verify_command

app = typer.Typer(
    name="stepgraph",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"stepgraph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """CUDA graphs for PyTorch decode loops: captured, padded, dispatched, and accounted for."""


@app.command("run")
def run_command(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; '-' reads them from standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    model: ModelOption = None,
    graphs: Annotated[
        Graphs,
        typer.Option(help="Replay steps as graphs, as graphs around attention, or run them eagerly; or vLLM's modes."),
    ] = Graphs.FULL,
    compile: Compile = Compiler.OFF,
    ladder: LadderOption = "vllm",
    device: Where = None,
    attention: Attention = None,
    operations: Operations = None,
    dtype: Annotated[
        DType, typer.Option(help="Type of weights and activations; auto: float32 on a CPU, as stored on a GPU.")
    ] = DType.AUTO,
    adapter: Adapter = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k best tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the best tokens that hold this probability.")] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Sample among tokens with at least this share of the best one's probability; 0 is off."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens of prompt and answer; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logits of tokens that the answer has; 0 is off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken from them once for each time the answer has them; 0 is off.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; the same seed repeats the run.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests decoded at once, at most. Default: the number of prompts, up to 256.")
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(help="Of a GPU's memory, what this and all else there may take together. Default: 0.9."),
    ] = None,
    kv_bytes: Annotated[
        int | None, typer.Option(help="Bytes of the KV cache. Default: what is left of the memory fraction.")
    ] = None,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Serve once the largest graphs are there; capture the others in gaps.")
    ] = False,
    steps_per_launch: Annotated[
        str,
        typer.Option(
            help="Decode steps that the device runs by itself, at most: a number; auto: many, 1 for a stream."
        ),
    ] = "1",
    tp: Annotated[
        int | None, typer.Option(help="Ranks, one a GPU, that compute the model together; started here.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="A folder with tables of `tune allreduce`, for several ranks.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts into the model's chat template.")] = True,
    as_json: Json = False,
) -> None:
    """Decode prompts, print the answers, and say how each step ran."""
    with one_line_errors():
        from stepgraph.cli.run import RunOptions, run

        options = RunOptions(
            prompts=tuple(prompts or ()),
            file=file,
            model=model,
            graphs=graphs.value,
            compile=compile.value,
            ladder=ladder,
            device=None if device is None else device.value,
            attention=attention,
            operations=operations,
            dtype=dtype.value,
            adapter=adapter,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            max_num_seqs=max_num_seqs,
            memory_fraction=memory_fraction,
            kv_bytes=kv_bytes,
            lazy=lazy,
            steps_per_launch=steps_per_launch,
            tp=tp,
            tables=tables,
            chat=chat,
            as_json=as_json,
        )
        code = run(options)
    if code:
        raise typer.Exit(code)


@app.command("env")
def env_command(
    as_json: Json = False,
) -> None:
    """Say what works on this machine and what does not, and why."""
    with one_line_errors():
        from stepgraph.cli.env import env

        if not env(as_json=as_json):
            raise typer.Exit(1)


@app.command("explain")
def explain_command(
    config: Annotated[Path, typer.Argument(help="A JSON file; examples/explain.json shows its fields.")],
    as_json: Json = False,
    strict: Annotated[bool, typer.Option(help="Refuse a configuration that would get less than it asks for.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the padding of every batch into this PNG.")] = None,
) -> None:
    """Say what a configuration will do, batch by batch, without a GPU."""
    with one_line_errors():
        from stepgraph.cli.explain import explain

        explain(config, as_json=as_json, strict=strict, picture=picture)


app.command("verify")(verify_command)
app.command("memory")(memory_command)
app.add_typer(plan_app, name="plan")
app.add_typer(tune_app, name="tune")
app.command("launch")(launch_command)
app.command("census")(census_command)
app.command("account")(account_command)
app.command("bench")(bench_command)
app.command("padding")(padding_command)
app.command("sweep")(sweep_command)
app.command("report")(report_command)
app.command("trace")(trace_command)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `stepgraph` command. Always ends with SystemExit."""
    try:
        app(args=None if argv is None else list(argv), prog_name="stepgraph")
    except SystemExit as ended:
        leave_at_once(int(ended.code or 0))
        raise
    raise SystemExit(0)
