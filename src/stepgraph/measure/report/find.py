"""What a folder holds for a report: results, pictures, and files that are neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepgraph.measure.curve import load_curve
from stepgraph.measure.sweep.cells import Work, key_of
from stepgraph.measure.sweep.check_row import require_row
from stepgraph.measure.sweep.rows_file import read_rows
from stepgraph.measure.sweep.sweep_result import sweep_result
from stepgraph.runtime.errors import ConfigError

FIELDS = {"name": str, "definition": str, "machine": str, "commit": str, "versions": Mapping, "columns": Sequence,
          "rows": Sequence}  # fmt: skip
"""What every result file holds, as `Result.to_json` writes it."""
MOST_BYTES = 64 << 20
"""Of a file that is read: a trace may be JSON too, and is far larger than a result."""


@dataclass(frozen=True)
class Found:
    """One result as its file holds it. path: below the folder."""

    path: Path
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Folder:
    """pictures: PNG and SVG files. left_out: of JSON files that hold no result, why not."""

    path: Path
    results: list[Found] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)

    def pictures_of(self, found: Found) -> list[Path]:
        """Those that lie beside the result and are called like its file."""
        return [path for path in self.pictures if path.with_suffix("") == found.path.with_suffix("")]


def find_results(path: Path) -> Folder:
    """Everything below `path`, in the order of the names.

    Raises:
        ConfigError: no folder, or none with a result.
    """
    if not path.is_dir():
        raise ConfigError(f"report: {path} is no folder")
    folder = Folder(path)
    for each in sorted(file for file in path.rglob("*") if file.is_file()):
        below, kind = each.relative_to(path), each.suffix.lower()
        if kind in (".png", ".svg"):
            folder.pictures.append(below)
        elif kind in (".json", ".jsonl"):
            try:
                folder.results.extend(Found(below, result) for result in _read(each))
            except (ConfigError, OSError, ValueError) as error:
                folder.left_out[below] = str(error)
            except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                folder.left_out[below] = f"no result: {type(error).__name__}: {error}"
    if not folder.results:
        raise ConfigError(
            f"report: {path} holds no result; write one there, for example `stepgraph bench --json > bench.json`"
        )
    return folder


def tables_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All tables of a result: its own columns and rows, and those beside them."""
    own = {"title": "", "columns": result["columns"], "rows": result["rows"], "definitions": {}}
    others = list(result.get("tables", ()))
    if any(list(table["columns"]) == list(own["columns"]) and table["rows"] == own["rows"] for table in others):
        return others  # where there are no figures the first table is both
    return [own, *others]


def _read(path: Path) -> list[Mapping[str, Any]]:
    """Raises OSError where the file cannot be read, another error where it holds no result."""
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"larger than {MOST_BYTES >> 20} MiB")
    if path.suffix.lower() == ".jsonl":
        sweeps: dict[Work, list[dict[str, Any]]] = {}
        for (work, _), row in read_rows(path).items():
            sweeps.setdefault(work, []).append(row)
        return [sweep_result(rows).to_json() for rows in sweeps.values()]
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, Mapping):
        raise ConfigError("no result: not an object")
    for name, kind in FIELDS.items():
        if not isinstance(result.get(name), kind):
            raise ConfigError(f"no result: no {name}")
    for table in tables_of(result):
        _require_table(table)
    _ = [str(note) for note in result.get("notes", ())]
    if "curve" in result:
        load_curve(path)
    for row in result.get("cells", ()):
        key_of(row)
        require_row(row)
    return [result]


def _require_table(table: Mapping[str, Any]) -> None:
    """Raises ConfigError, KeyError or TypeError for one that a page could not show."""
    columns = table["columns"]
    if not all(isinstance(name, str) for name in (table["title"], *columns)):
        raise ConfigError("no result: the titles of a table are texts")
    if not all(isinstance(text, str) for text in table.get("definitions", {}).values()):
        raise ConfigError("no result: a table's definitions are texts")
    for row in table["rows"]:
        if len(row) != len(columns):
            raise ConfigError(f"a row of {len(row)} cells under {len(columns)} columns")
