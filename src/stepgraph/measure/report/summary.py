"""What graphs buy: every comparison of eager steps with graphs that the results hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.measure.report.find import Found, tables_of
from stepgraph.measure.show import number

PREFIX = "eager / "
"""Begins the name of a figure, or of a column, that compares eager with something."""


@dataclass(frozen=True)
class Gain:
    """times: how often the graphs' time goes into eager's, as text with its interval where there is one."""

    machine: str
    source: str
    step: str
    graphs: str
    times: str


def gains(results: Sequence[Found]) -> list[Gain]:
    """In the order of the results."""
    found = []
    for each in results:
        for table in tables_of(each.result):
            for row in table["rows"]:
                found += [
                    Gain(each.result["machine"], str(each.path), *told) for told in _of_row(table["columns"], row)
                ]
    return found


def _of_row(columns: Sequence[str], row: Sequence[Any]) -> list[tuple[str, str, str]]:
    """(step, graphs, times) of a row."""
    if columns[0] == "figure" and {"median", "low", "high", "definition"} <= set(columns):
        name, told = str(row[0]), dict(zip(columns, row, strict=True))
        if not name.startswith(PREFIX):
            return []
        spread = "" if told["low"] is None else f" ({number(told['low'])} to {number(told['high'])})"
        return [(told["definition"], name.removeprefix(PREFIX), number(told["median"]) + spread)]
    found = []
    for column, value in zip(columns, row, strict=True):
        if column.startswith(PREFIX) and value is not None:
            graphs, step = column.removeprefix(PREFIX), str(row[0])
            if graphs == "this":  # of a sweep, whose rows begin with the graphs
                graphs, step = step, f"decode, rows {row[1]}"
            found.append((step, graphs, number(value)))
    return found
