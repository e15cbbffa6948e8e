"""`stepgraph tune allreduce`: measure the all-reduces of several GPUs, and write down which fits which size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.cli.options import one_line_errors

if TYPE_CHECKING:
    from stepgraph.comm.group import Group
    from stepgraph.measure.all_reduce.tune import Tuned


_FEWER = "start fewer, or tune on a node that has more: on the CPU there is nothing to choose from"


def allreduce_command(
    out: Annotated[Path, typer.Option(help="The folder for the table; `run --tables` reads it from there.")],
    tp: Annotated[int | None, typer.Option(help="Ranks, one a GPU; started here. Or use torchrun.")] = None,
    samples: Annotated[int, typer.Option(help="Of each algorithm at each size.", min=3)] = 15,
    picture: Annotated[Path | None, typer.Option(help="Draw the times into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table and all times as JSON.")] = False,
) -> None:
    """Find up to which size which all-reduce is the fastest, captured and eager, and write the table."""
    with one_line_errors():
        from stepgraph.cli.ranks import joined, launch, must_launch, require_gpus
        from stepgraph.runtime.errors import ConfigError

        code = 0
        if tp is not None and must_launch(tp):
            require_gpus(tp, "cuda", _FEWER)
            code = launch(tp)
        else:
            with joined(tp, "cuda", fewer=_FEWER) as group:
                if group is None:
                    raise ConfigError("tune allreduce: needs two ranks or more; give --tp, or start it with torchrun")
                _tune(group, out, samples, picture, as_json)
    if code:
        raise typer.Exit(code)


def _tune(group: Group, out: Path, samples: int, picture: Path | None, as_json: bool) -> None:
    from stepgraph.cli.console import ProgressBar
    from stepgraph.comm.communicator import make_all_reduce
    from stepgraph.comm.eligible import why_no_kernels
    from stepgraph.comm.thresholds import Table, Thresholds, write_table
    from stepgraph.measure.all_reduce.draw import draw
    from stepgraph.measure.all_reduce.tune import tune
    from stepgraph.measure.picture import require_picture
    from stepgraph.runtime.errors import ConfigError

    if picture is not None:
        require_picture(picture)
    why = why_no_kernels(group)
    if why is not None:
        raise ConfigError(f"tune allreduce: there is nothing to choose from, since {why}")
    wide = Thresholds(16 << 20, 16 << 20, 128 << 20)  # room for every algorithm
    all_reduce = make_all_reduce(group, table=Table("any", group.world, wide, wide, "for tuning"))
    group.before_close(all_reduce.close)
    with ProgressBar(quiet=as_json or group.rank > 0) as progress:
        tuned = tune(group, all_reduce, samples=samples, progress=progress)
    if group.rank:
        return
    path = write_table(tuned.table, out)
    if picture is not None:
        draw(tuned.times, tuned.table, picture)
    print(json.dumps(_as_json(tuned) if as_json else tuned.table.as_dict(), indent=2))
    if not as_json:
        print(f"written to {path}")


def _as_json(tuned: Tuned) -> dict[str, object]:
    times = [
        {"bytes": size, "algorithm": name, "captured": captured, "us": samples}
        for size, took in tuned.times.items()
        for (name, captured), samples in took.items()
    ]
    return {"table": tuned.table.as_dict(), "times": times}
