"""Render the result tables of the README from benchmarks/results/*.json, so that no figure is written by hand.

A result file holds {name, definition, unit, machine, versions, commit, columns, rows, samples}: `columns` are
titles, `rows` lists of cells in their order, `versions` a mapping of package to version. The table of the file
named NAME replaces whatever stands between `<!-- table:NAME -->` and `<!-- /table -->`.

    python scripts/render_tables.py [--check] [FILE ...]

FILE defaults to README.md and docs/results.md. With --check nothing is written, and the exit status is 1 where a table
is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = ("name", "definition", "unit", "machine", "versions", "commit", "columns", "rows", "samples")
MARKER = re.compile(r"(<!-- table:(?P<name>[\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NOT_MEASURED = "*Not measured yet.*\n"


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result file of `folder` by its name. Raises ValueError, naming the file, where one is incomplete."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [field for field in FIELDS if field not in result]
        if missing:
            raise ValueError(f"{path.name}: no {', '.join(missing)}")
        for row in result["rows"]:
            if len(row) != len(result["columns"]):
                raise ValueError(f"{path.name}: a row has {len(row)} cells, there are {len(result['columns'])} columns")
        if result["name"] in results:
            raise ValueError(f"{path.name}: a second file with the name {result['name']!r}")
        results[result["name"]] = result
    return results


def cell(value: object) -> str:
    """A cell as text: three significant digits, or whole numbers from 1000 up, with separators."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    if isinstance(value, float):
        if value == 0:
            return "0"
        digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
        return f"{value:.{3 - digits}f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def short_commit(commit: str) -> str:
    """Twelve digits, and whether the tree held more than the commit."""
    digits, dash, rest = commit.partition("-")
    return digits[:12] + dash + rest


def render(result: Mapping[str, Any]) -> str:
    """One result as a Markdown table with its definition above and its origin below."""
    numeric = [all(isinstance(row[i], int | float) for row in result["rows"]) for i in range(len(result["columns"]))]
    lines = [
        f"{result['definition'].strip()} Unit: {result['unit']}.",
        "",
        "| " + " | ".join(cell(title) for title in result["columns"]) + " |",
        "|" + "|".join("---:" if right else "---" for right in numeric) + "|",
        *("| " + " | ".join(cell(value) for value in row) + " |" for row in result["rows"]),
        "",
        f"*{result['machine']}; "
        + ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        + f"; commit {short_commit(result['commit'])}.*",
    ]
    return "\n".join(lines) + "\n"


def fill(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with every marked table replaced by its result, or by a note where it was not measured yet."""

    def table(match: re.Match[str]) -> str:
        result = results.get(match["name"])
        return match[1] + (NOT_MEASURED if result is None else render(result)) + match[3]

    return MARKER.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Render the result tables from benchmarks/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is out of date")
    parser.add_argument(
        "files", nargs="*", type=Path, default=[ROOT / "README.md", ROOT / "docs" / "results.md"], metavar="FILE"
    )
    options = parser.parse_args(argv)
    try:
        results = load_results(RESULTS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stale = False
    for path in options.files:
        old = path.read_text(encoding="utf-8")
        new = fill(old, results)
        if new == old:
            continue
        stale = True
        if not options.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.name}: {'out of date; run `make tables`' if options.check else 'rendered'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
