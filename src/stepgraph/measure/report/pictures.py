"""Which pictures a result is worth, drawn from its figures alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepgraph.measure.report.drawing import Spread, draw_lines, draw_spreads
from stepgraph.measure.report.find import tables_of
from stepgraph.measure.stats import quantiles
from stepgraph.measure.sweep.sweep_result import latency_lines

MOST = 40
"""Lines of a picture; a longer table is read as one."""


def draw_result(result: Mapping[str, Any]) -> list[str]:
    """SVG elements: medians with their spread by unit, a latency curve, a sweep's latencies."""
    drawn = []
    for table in tables_of(result):
        for unit, spreads in _spreads(table, str(result.get("unit", ""))).items():
            if 2 <= len(spreads) <= MOST:
                drawn.append(draw_spreads(f"{table['title'] or result['name']}, {unit}".rstrip(", "), unit, spreads))
    if isinstance(curve := result.get("curve"), Mapping) and "cells" not in result:
        samples = {int(rows): quantiles(taken)["median"] for rows, taken in curve["samples"].items()}
        drawn.append(draw_lines("latency curve", "rows", "ms a step", {str(curve["what"]): sorted(samples.items())}))
    if "cells" in result and (lines := latency_lines(result["cells"])):
        drawn.append(draw_lines("latency by rows", "rows", "ms a step", lines))
    return drawn


def _spreads(table: Mapping[str, Any], unit: str) -> dict[str, list[Spread]]:
    """By unit; those of figures, or of a table with columns for median, p10 and p90."""
    columns = list(table["columns"])
    if not {"median", "p10", "p90"} <= set(columns):
        return {}
    median, low, high = (columns.index(name) for name in ("median", "p10", "p90"))
    by_unit: dict[str, list[Spread]] = {}
    for row in table["rows"]:
        if not all(_is_number(row[place]) or row[place] is None for place in (median, low, high)):
            continue
        if row[median] is not None:
            ends = [row[median] if row[place] is None else row[place] for place in (low, high)]
            its = str(row[columns.index("unit")]) if "unit" in columns else unit
            label = _label(columns, row, median)
            by_unit.setdefault(its, []).append(Spread(label, ends[0], row[median], ends[1]))
    return by_unit


def _label(columns: Sequence[str], row: Sequence[Any], median: int) -> str:
    """What stands before the median; a number with its column's title."""
    return ", ".join(
        f"{name} {value}" if _is_number(value) else str(value)
        for name, value in zip(columns[:median], row[:median], strict=True)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
