"""What every instrument returns: figures with their definitions, and where they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stepgraph.measure.machine import commit, machine, versions
from stepgraph.measure.stats import interval, quantiles
from stepgraph.runtime.whole_file import write_whole


@dataclass(frozen=True)
class Figure:
    """One number and what it means.

    samples: in `unit`, all of them; a single one for what was computed, counted or published.
    """

    name: str
    unit: str
    definition: str
    samples: Sequence[float]

    @classmethod
    def of(cls, name: str, value: float, unit: str, definition: str) -> Figure:
        """A number that has no spread."""
        return cls(name, unit, definition, (value,))

    @property
    def median(self) -> float:
        return self._quantiles["median"]

    @property
    def spread(self) -> tuple[float, float] | None:
        """p10 and p90; None for a single sample."""
        return (self._quantiles["p10"], self._quantiles["p90"]) if len(self.samples) > 1 else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """A 95 % bootstrap interval of the median; None for a single sample."""
        return interval(self.samples) if len(self.samples) > 1 else None

    @cached_property
    def _quantiles(self) -> dict[str, float]:
        return quantiles(self.samples)


@dataclass(frozen=True)
class Rows:
    """A table of another form. definitions: what stands in a column, by the column's title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    definitions: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What one instrument found.

    name: of its file. definition: what holds for all of its figures. notes: sentences below the tables, such as a
    verdict, a caveat, or what this machine cannot measure. more: anything else that belongs in the file.
    """

    name: str
    definition: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Rows] = ()
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    machine: str = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)

    def to_json(self) -> dict[str, Any]:
        """As in benchmarks/results; columns and rows are the figures', or the first table's where there are none."""
        columns: list[str] = ["figure", "median", "p10", "p90", "low", "high", "unit", "definition"]
        rows = [_row(figure) for figure in self.figures]
        unit = ", ".join(dict.fromkeys(figure.unit for figure in self.figures if figure.unit)) or "as the columns say"
        if not rows and self.tables:
            columns, rows = list(self.tables[0].columns), [list(row) for row in self.tables[0].rows]
        return {
            "name": self.name,
            "definition": self.definition,
            "unit": unit,
            "machine": self.machine,
            "versions": dict(self.versions),
            "commit": self.commit,
            "columns": columns,
            "rows": rows,
            "tables": [
                {
                    "title": table.title,
                    "columns": list(table.columns),
                    "rows": [list(row) for row in table.rows],
                    "definitions": dict(table.definitions),
                }
                for table in self.tables
            ],
            "notes": list(self.notes),
            **self.more,
            "samples": {figure.name: list(figure.samples) for figure in self.figures},
        }


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Write `result`, as `to_json` gives it, as NAME.json, whole or not at all. Raises OSError where it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}.json"
    write_whole(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def _row(figure: Figure) -> list[Any]:
    p10, p90 = figure.spread or (None, None)
    low, high = figure.interval or (None, None)
    return [figure.name, figure.median, p10, p90, low, high, figure.unit, figure.definition]
