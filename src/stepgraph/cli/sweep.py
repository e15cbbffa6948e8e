"""`stepgraph sweep`: many configurations of a decode step, one after the other, into a file that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgraph.cli.options import Json, Where, default_device, one_line_errors
from stepgraph.cli.step_commands import Model

if TYPE_CHECKING:
    from stepgraph.measure.sweep.cells import Cell, Work


@dataclass(frozen=True)
class SweepOptions:
    """The options of the command line; lists are separated by commas, None is the device's own choice."""

    out: Path
    model: str | None = None
    graphs: str = "full,breakable,disabled"
    attention: str | None = None
    operations: str | None = None
    rows: str = "1,8"
    context: int = 512
    steps: int = 64
    isolate: bool = False
    ray: str | None = None
    compile: str = "off"
    device: str | None = None
    picture: Path | None = None
    as_json: bool = False


def sweep_command(
    out: Annotated[Path, typer.Option(help="The file of rows (JSON lines); cells that it has are not measured again.")],
    model: Model = None,
    graphs: Annotated[str, typer.Option(help="The graphs to measure, as for `run`.")] = "full,breakable,disabled",
    compile: Annotated[
        str, typer.Option(help="What compiles the step: off, inductor (with reference operations), aot_eager.")
    ] = "off",
    attention: Annotated[str | None, typer.Option(help="Attention backends. Default: the device's own.")] = None,
    operations: Annotated[
        str | None, typer.Option(help="What computes a layer: fused, unfused, reference. Default: the device's own.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Numbers of requests that decode at once.")] = "1,8",
    context: Annotated[int, typer.Option(help="Tokens that each of them attends to.")] = 512,
    steps: Annotated[int, typer.Option(help="Timed steps of a cell, for each of its clocks.")] = 64,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="A process for each cell. Default: one, and another where it died.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Over a Ray cluster: its address, auto, or local to start one here."),
    ] = None,
    device: Where = None,
    picture: Annotated[Path | None, typer.Option(help="Draw latency by rows into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a decode step in every combination of the lists, each in a process that may fail. Can be resumed."""
    with one_line_errors():
        any_done = run_sweep(
            SweepOptions(
                out=out,
                model=model,
                graphs=graphs,
                attention=attention,
                operations=operations,
                rows=rows,
                context=context,
                steps=steps,
                isolate=isolate,
                ray=ray,
                compile=compile,
                device=None if device is None else device.value,
                picture=picture,
                as_json=as_json,
            )
        )
    if not any_done:
        raise typer.Exit(1)


def run_sweep(options: SweepOptions) -> bool:
    """Measure what the file lacks, and print all that was asked for. Returns whether any cell has figures.

    Raises:
        StepgraphError: an option, the model or the file cannot work. What a cell cannot do is a row of it.
    """

    from stepgraph.cli.console import ProgressBar
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.measure.sweep.cells import Work, make_cells
    from stepgraph.measure.sweep.rows_file import RowsFile
    from stepgraph.measure.sweep.sweep_result import draw, sweep_result
    from stepgraph.runtime.whole_file import require_writable

    if options.picture is not None:
        require_picture(options.picture)
    device = default_device(options.device)
    work = Work(options.model, device, options.context, options.steps)
    attention, operations = _names(options.attention), _names(options.operations)
    cells = make_cells(_list(options.graphs), attention, operations, _numbers(options.rows), _list(options.compile))
    file = RowsFile(options.out)
    missing = [cell for cell in cells if (work, cell) not in file.rows]
    measured = _measure(options, work, missing)  # which refuses what cannot be
    if missing:
        require_writable(options.out)  # before a cell is measured, which takes a while
    with ProgressBar(quiet=options.as_json) as progress:
        progress(len(cells) - len(missing), len(cells), "sweep")
        for done, row in enumerate(measured, start=len(cells) - len(missing) + 1):
            file.add(row)
            progress(done, len(cells), "sweep")
    found = [file.rows[work, cell] for cell in cells]
    if options.picture is not None:
        draw(options.picture, found)
    show(sweep_result(found), as_json=options.as_json)
    failed = sum(row["failed"] is not None for row in found)
    if failed:
        which = "all" if failed == len(found) else f"{failed} of"
        typer.echo(
            f"sweep: {which} {len(found)} cells failed; {options.out} has the reasons, and a cell whose line is taken "
            f"out is measured again",
            err=True,
        )
    return failed < len(found)


def _measure(options: SweepOptions, work: Work, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    from stepgraph.measure.sweep.measure_cell import measure_row
    from stepgraph.measure.sweep.on_ray import require_ray, run_on_ray
    from stepgraph.measure.sweep.processes import run_in_processes
    from stepgraph.runtime.platforms import platform_for

    if not cells:
        return iter(())
    if options.ray is not None:
        require_ray()
        return run_on_ray(work, cells, measure_row, address=options.ray)
    platform_for(work.device)  # refuses a device that is not there
    _require_model(work)
    return run_in_processes(work, cells, measure_row, isolate=options.isolate)


def _require_model(work: Work) -> None:
    """Raises StepgraphError where no cell could load the model; a hub id shows that only when it is fetched."""
    from stepgraph.cli.plan import model_config
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.engine.hub import is_hub_id
    from stepgraph.runtime.errors import ConfigError

    name = str(demo_model_path()) if work.model is None else work.model
    if not Path(name).exists() and is_hub_id(name):
        return
    most = model_config(name).max_position_embeddings
    if work.context + 1 > most:
        raise ConfigError(
            f"sweep: {name} allows sequences of {most} tokens, not of {work.context + 1}; lower --context"
        )


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _names(text: str | None) -> list[str | None]:
    return [None] if text is None else list(_list(text))


def _numbers(text: str) -> list[int]:
    from stepgraph.runtime.errors import ConfigError

    try:
        return [int(part) for part in _list(text)]
    except ValueError:
        raise ConfigError(f"sweep: --rows {text!r} is no list of numbers such as 1,8,32") from None
