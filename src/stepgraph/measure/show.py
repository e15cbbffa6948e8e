"""Prints what an instrument found: JSON, or tables with a definition beside each number."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.measure.result import Result, Rows


def show(result: Result, *, as_json: bool) -> None:
    """To standard output. as_json: the whole result and nothing else."""
    if as_json:
        print(json.dumps(result.to_json(), indent=1, ensure_ascii=False))
        return
    console = Console()
    console.print(escape(result.definition), "")
    if result.figures:
        console.print(_figures(result), "")
    for table in result.tables:
        console.print(_rows(table))
        for column, definition in table.definitions.items():
            console.print(f"  [bold]{escape(column)}[/]: {escape(definition)}")
        console.print()
    for note in result.notes:
        console.print(escape(note))
    packages = ", ".join(f"{package} {version}" for package, version in result.versions.items())
    console.print(escape(f"{result.machine}; {packages}; commit {result.commit}"), style="dim")


def number(value: Any) -> str:
    """A value as text: three significant digits, or whole numbers from 1000 up."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _figures(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure, and what it is", min_width=24)
    for title in ("median", "p10 to p90", "95 % interval"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("unit")
    for figure in result.figures:
        named = f"{escape(figure.name)}\n[dim]{escape(figure.definition)}[/]"
        table.add_row(named, number(figure.median), _span(figure.spread), _span(figure.interval), escape(figure.unit))
    return table


def _span(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{number(ends[0])} to {number(ends[1])}"


def _rows(rows: Rows) -> Table:
    table = Table(title=escape(rows.title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(rows.columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows.rows)
        table.add_column(escape(column), justify="right" if numeric else "left")
    for row in rows.rows:
        table.add_row(*(escape(number(value)) for value in row))
    return table
