"""What `stepgraph explain` draws: tables for a terminal, and a picture of padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.measure.picture import new_picture, require_picture, save_picture
from stepgraph.runtime.dispatch import Decision, Mode

COLOURS = {Mode.FULL: "tab:blue", Mode.BREAKABLE: "tab:orange", Mode.PIECEWISE: "tab:green", Mode.EAGER: "tab:red"}


def print_report(report: Mapping[str, Any]) -> None:
    """The tables of `stepgraph explain`, from the same mapping that --json prints."""
    console = Console()
    console.print(_backends(report), "")
    if report["changes"]:
        console.print(_changes(report["changes"]), "")
    for kind in report["batches"]:
        console.print(_kind(kind), "")
    graphs = report["graphs"]
    console.print("[bold]graphs[/]  " + (", ".join(f"{mode} {n}" for mode, n in graphs.items()) or "none"))
    console.print("[bold]what to change[/]" if report["advice"] else "[bold]nothing to change[/]")
    for advice in report["advice"]:
        console.print(escape(f"  {advice}"))


def _backends(report: Mapping[str, Any]) -> Table:
    table = Table("phase", "full", "breakable", "disabled", title="what each backend would give (asked for: bold)")
    for row in report["backends"]:
        cells = [
            f"[bold]{escape(gets)}[/]" if backend == row["asked"] else escape(gets)
            for backend, gets in row["gets"].items()
        ]
        table.add_row(row["phase"], *cells)
    return table


def _changes(changes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("setting", "asked", "taken", "severity", "rule and reason", title="what had to change")
    for change in changes:
        setting, before, after, severity = (escape(change[name]) for name in ("where", "before", "after", "severity"))
        table.add_row(setting, before, after, severity, escape(f"{change['rule']}: {change['reason']}"))
    return table


def _kind(kind: Mapping[str, Any]) -> Table:
    modes = ", ".join(f"{mode} {count}" for mode, count in kind["modes"].items())
    title = f"{kind['kind']}: {kind['batches']} batches ({modes}), {kind['missed']} without a key of their own kind"
    worst = kind["worst_padding"]
    caption = None
    if worst is not None:
        caption = f"worst padding: {worst['real']} → {worst['padded']} {worst['unit']} ({worst['share']:.1%})"
    table = Table(kind["unit"], "mode", "rung", "why", title=title, caption=caption)
    for sizes, mode, rung, why in _lines(kind["ranges"], kind["unit"]):
        table.add_row(sizes, mode, rung, escape(why))
    return table


def _lines(ranges: Sequence[Mapping[str, Any]], unit: str) -> Iterator[tuple[str, str, str, str]]:
    """One line a range, and one for neighbouring sizes that are each a rung of their own."""
    done = 0
    while done < len(ranges):
        last = done
        while last < len(ranges) and _own_rung(ranges[last]) and ranges[last]["mode"] == ranges[done]["mode"]:
            last += 1
        if last > done + 1:
            yield _span(ranges[done]["first"], ranges[last - 1]["last"]), ranges[done]["mode"], "its own", ""
            done = last
            continue
        one = ranges[done]
        rung = "–" if one["rung"] is None else f"{one['rung']} {one['rung_unit'] if one['rung_unit'] != unit else ''}"
        why = "" if not one["detail"] else f"{one['reason']}: {one['detail']}"
        yield _span(one["first"], one["last"]), one["mode"], rung.strip(), why
        done += 1


def _own_rung(one: Mapping[str, Any]) -> bool:
    return bool(one["first"] == one["last"] == one["rung"]) and not one["detail"]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def draw(path: Path, kinds: Mapping[str, Sequence[Decision]]) -> None:
    """A PNG: rows computed against real rows, a panel for each kind of batch, coloured by mode.

    Raises:
        ConfigError: no PNG is asked for, it cannot be written, or matplotlib is missing.
    """
    require_picture(path)
    figure = new_picture(6 * len(kinds), 5)
    for axes, (name, coverage) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds.items(), strict=True):
        for mode, colour in COLOURS.items():
            taken = [decision for decision in coverage if decision.mode is mode]
            if taken:
                real, padded = [d.batch.num_tokens for d in taken], [d.key.num_tokens for d in taken]
                axes.plot(real, padded, ".", markersize=3, color=colour, label=f"{mode} ({len(taken)} batches)")
        top = coverage[-1].key.num_tokens if coverage else 1
        axes.plot([0, top], [0, top], color="grey", linewidth=0.5, label="no padding")
        axes.set(title=name, xlabel="real tokens", ylabel="computed tokens")
        axes.legend()
    save_picture(figure, path)
