"""What `stepgraph memory` and `stepgraph plan memory` draw: tables on standard output, and a stacked picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.cli.console import covered
from stepgraph.measure.picture import new_picture, save_picture
from stepgraph.runtime.memory.units import in_units

MOST_GRAPHS = 12
"""Graphs that the table lists; JSON has them all."""


def print_ledger(report: Mapping[str, Any]) -> None:
    """From the same mapping that --json prints."""
    console = Console()
    table = _table("memory", "")
    for row in report["rows"]:
        name = f"  of it {row['name']} (in {row['of']})" if row["of"] else row["name"]
        table.add_row(escape(name), in_units(row["bytes"]))
    table.add_row("[bold]all of these[/]", in_units(report["total_bytes"]))
    if report["device"] is not None:
        taken = report["device"]["total"] - report["device"]["free"]
        table.add_row("the device says", f"{in_units(taken)} of {in_units(report['device']['total'])}")
        table.add_row("residual", in_units(report["residual_bytes"]))
    console.print(table)
    compiled = report["compile"] is not None  # a column less where nothing was: then all fit into 80 characters
    costs = ("pool", "driver", "nodes", *(["compile"] if compiled else []), "warm-up", "capture", "instantiate")
    families = _table("graphs", "number", *costs)
    for name, one in report["families"].items():
        families.add_row(name, str(one["graphs"]), *_costs(one, compiled))
    console.print(families)
    for name, one in report["families"].items():
        types = ", ".join(f"{number} {kind}" for kind, number in one["nodes"].items())
        console.print(f"nodes of {name} graphs: {types}")
    graphs = _table("key", *costs)
    for one in report["graphs"][:MOST_GRAPHS]:
        graphs.add_row(f"{one['family']}: {one['key']}", *_costs(one, compiled))
    if len(report["graphs"]) > MOST_GRAPHS:
        graphs.add_row(f"{len(report['graphs']) - MOST_GRAPHS} more (--json lists them)")
    console.print(graphs)
    for key, why in report["dropped"].items():
        console.print(escape(f"dropped {key}: {why}"))
    for kind, coverage in report["coverage"].items():
        console.print(f"coverage of {covered(kind, coverage)}")
    estimates = _table("estimate of pool and driver", "predicted", "observed", "miss")
    for one in report["estimates"]:
        predicted, observed = one["bytes"], one["observed_bytes"]
        miss = f"{(predicted - observed) / observed:+.1%}" if observed else "–"
        estimates.add_row(escape(one["name"]), in_units(predicted), in_units(observed), miss)
    console.print(estimates)
    if report["compile"] is not None:
        total = report["compile"]
        console.print(
            f"compiled with {total['backend']}: {total['distinct']} of {total['pieces']} pieces in "
            f"{total['seconds']:.2f} s, which the seconds of the capture hold too"
        )
    console.print(f"captured in {report['seconds']:.2f} s ({escape(report['model'])} on {report['device_name']})")


def print_plan(report: Mapping[str, Any]) -> None:
    """From the same mapping that --json prints."""
    table = _table(f"memory of {escape(report['model'])} on {escape(report['device'])}", "")
    for row in report["rows"]:
        table.add_row(escape(row["name"]), in_units(row["bytes"]))
    table.add_row("[bold]taken before the KV cache[/]", in_units(report["taken_bytes"]))
    table.add_row("budget", in_units(report["budget_bytes"]))
    left = in_units(report["budget_bytes"] - report["taken_bytes"])
    table.add_row("left for the KV cache", f"{left}: {report['kv_blocks']} blocks, {report['kv_tokens']} tokens")
    console = Console()
    console.print(table)
    graphs = ", ".join(f"{number} {family}" for family, number in report["graphs"].items())
    console.print(f"graphs in the prediction: {graphs or 'none'}")
    for note in report["notes"]:
        console.print(note)


def draw_ledger(path: Path, report: Mapping[str, Any]) -> None:
    """A PNG: one bar with every row, and how pool and driver grew from graph to graph.

    Raises:
        ConfigError: the file cannot be written.
    """
    mib = 1 << 20
    figure = new_picture(12, 5)
    stack, growth = figure.subplots(1, 2)
    rows = [(row["name"], row["bytes"]) for row in report["rows"] if not row["of"]]
    if report["residual_bytes"] is not None:
        rows.append(("residual", report["residual_bytes"]))
    bottom = 0.0
    for name, nbytes in rows:
        stack.bar([0], [max(nbytes, 0) / mib], bottom=bottom, label=f"{name}: {in_units(nbytes)}")
        bottom += max(nbytes, 0) / mib
    stack.set(xlim=(-0.5, 2.5), xticks=[], ylabel="MiB", title="memory")
    stack.legend(fontsize=7, loc="upper right")
    for name in ("pool", "driver"):
        total, heights = 0, []
        for one in report["graphs"]:
            total += one[f"{name}_bytes"]
            heights.append(total / mib)
        growth.step(range(1, len(heights) + 1), heights, where="post", label=name)
    growth.set(xlabel="graphs captured, largest first", ylabel="MiB", title="taken by graphs")
    growth.legend()
    save_picture(figure, path)


def _costs(one: Mapping[str, Any], compiled: bool) -> list[str]:
    nodes = str(sum(one["nodes"].values()))
    seconds = (
        one[f"{what}_seconds"] for what in (*(["compile"] if compiled else []), "warmup", "capture", "instantiate")
    )
    return [in_units(one["pool_bytes"]), in_units(one["driver_bytes"]), nodes, *(f"{s * 1e3:.0f} ms" for s in seconds)]


def _table(first: str, *columns: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold")
    table.columns[0].no_wrap = True
    for column in columns:
        table.add_column(column, justify="right")
    return table
