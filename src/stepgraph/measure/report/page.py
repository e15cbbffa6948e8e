"""The page: what graphs buy, then every result with its pictures, tables and where it was measured."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from stepgraph.measure.report.find import Folder, Found, tables_of
from stepgraph.measure.report.pictures import draw_result
from stepgraph.measure.report.summary import gains
from stepgraph.measure.show import number

LONG = 25
"""Rows from which on a table is folded."""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } h1, h2, h3 { line-height: 1.2; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 1rem; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; } th, td { padding: .2rem .7rem .2rem 0; vertical-align: top; }
th { text-align: left; border-bottom: 1px solid var(--line); } .n { text-align: right; white-space: nowrap; }
figure { margin: 0; }
svg, img { max-width: 100%; display: block; margin: 1rem 0; } svg { width: 760px; } img { background: #fff; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; } .grid { stroke: var(--line); }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 1rem; } dl, .where, figcaption { font-size: 13px; color: var(--soft); }
"""


def make_page(folder: Folder) -> str:
    """Self-contained HTML: no scripts, nothing fetched. Results are drawn where no picture lies beside their file."""
    body = [f"<h1>What graphs buy</h1><p>From {escape(str(folder.path))}.</p>"]
    body.append(_gains(folder.results))
    body.append(_contents(folder.results))
    used: set[Path] = set()
    for index, found in enumerate(folder.results):
        beside = folder.pictures_of(found)
        used.update(beside)
        body.append(_section(index, found, [_image(folder.path, path) for path in beside]))
    if others := [path for path in folder.pictures if path not in used]:
        body.append("<h2>Other pictures</h2>" + "".join(_image(folder.path, path) for path in others))
    if folder.left_out:
        rows = [[str(path), why] for path, why in folder.left_out.items()]
        body.append("<h2>Left out</h2>" + _table({"title": "", "columns": ["file", "reason"], "rows": rows}))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>stepgraph: what graphs buy</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _gains(results: Sequence[Found]) -> str:
    found = gains(results)
    if not found:
        return "<p>No result here compares eager steps with graphs; <code>stepgraph bench</code> does.</p>"
    parts = []
    for machine in dict.fromkeys(gain.machine for gain in found):
        rows = [[gain.step, gain.graphs, gain.times, gain.source] for gain in found if gain.machine == machine]
        columns = ["step", "graphs", "eager / graphs", "result"]
        parts.append(_table({"title": machine, "columns": columns, "rows": rows}, folded=False))
    return (
        "<p>By how much graphs make the same step faster: its time without them over its time with them.</p>"
        + "".join(parts)
    )


def _contents(results: Sequence[Found]) -> str:
    links = [f'<a href="#r{index}">{escape(str(found.path))}</a>' for index, found in enumerate(results)]
    return f"<p>Results: {', '.join(links)}</p>"


def _section(index: int, found: Found, images: Sequence[str]) -> str:
    result = found.result
    packages = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    where = f"{result['machine']}; {packages}; commit {result['commit']}; {found.path}"
    drawn = [] if images else [f"<figure>{svg}</figure>" for svg in draw_result(result)]
    notes = [f"<p>{escape(str(note))}</p>" for note in result.get("notes", ())]
    unit = str(result.get("unit", "")).rstrip(", ")
    return "".join([
        f'<h2 id="r{index}">{escape(result["name"])}</h2><p>{escape(result["definition"])}</p>',
        *notes,
        *images,
        *drawn,
        f"<p>Unit: {escape(unit)}</p>" if unit else "",
        *(_table(table) for table in tables_of(result)),
        f'<p class="where">{escape(where)}</p>',
    ])  # fmt: skip


def _table(table: Mapping[str, Any], *, folded: bool = True) -> str:
    """folded: a long one is unfolded by a click."""
    columns, rows = table["columns"], table["rows"]
    numeric = [all(isinstance(row[place], int | float | None) for row in rows) for place in range(len(columns))]
    classes = [' class="n"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{escape(str(name))}</th>" for name, kind in zip(columns, classes, strict=True))
    lines = [
        "<tr>"
        + "".join(f"<td{kind}>{escape(number(value))}</td>" for value, kind in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    ]
    caption = f"<caption>{escape(table['title'])}</caption>" if table["title"] else ""
    made = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    if folded and len(rows) > LONG:
        made = f"<details><summary>{escape(table['title'] or 'table')}, {len(rows)} rows</summary>{made}</details>"
    meaning = table.get("definitions") or {}
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meaning.items())
    return made + (f"<dl>{told}</dl>" if told else "")


def _image(folder: Path, path: Path) -> str:
    """Raises OSError where it cannot be read."""
    data = base64.b64encode((folder / path).read_bytes()).decode()
    name = escape(str(path))
    source = f"data:{_TYPES[path.suffix.lower()]};base64,{data}"
    return f'<figure><img src="{source}" alt="{name}"><figcaption>{name}</figcaption></figure>'
