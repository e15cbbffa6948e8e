"""`stepgraph report`: one HTML page from all results of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import Json, one_line_errors


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the results lie, in folders below too.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: report.html in the folder.")] = None,
    as_json: Json = False,
) -> None:
    """Make one HTML page of all results in a folder: what graphs buy, with the pictures."""
    with one_line_errors():
        run_report(folder, out or folder / "report.html", as_json=as_json)


def run_report(folder: Path, out: Path, *, as_json: bool) -> None:
    """Write the page, and say what is on it.

    Raises:
        ConfigError: the folder holds no result, or the page cannot be written.
        OSError: a file cannot be read.
    """
    from dataclasses import asdict

    from stepgraph.measure.report.find import find_results
    from stepgraph.measure.report.page import make_page
    from stepgraph.measure.report.summary import gains
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.whole_file import write_whole

    found = find_results(folder)
    try:
        write_whole(out, _encodable(make_page(found)))
    except OSError as error:
        raise ConfigError(f"report: {error.strerror}") from None
    if as_json:
        told = {
            "page": str(out),
            "results": [str(each.path) for each in found.results],
            "pictures": [str(path) for path in found.pictures],
            "left_out": {str(path): why for path, why in found.left_out.items()},
            "gains": [asdict(gain) for gain in gains(found.results)],
        }
        print(_encodable(json.dumps(told, indent=1, ensure_ascii=False)))
        return
    count = len(found.results)
    print(_encodable(f"{out}: {count} {'result' if count == 1 else 'results'}"))
    for path, why in found.left_out.items():
        print(_encodable(f"left out: {path}: {why}"))


def _encodable(text: str) -> str:
    """A file's name may hold bytes that are no text, and JSON halves of a character."""
    return text.encode("utf-8", "replace").decode("utf-8")
