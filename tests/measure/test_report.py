"""The report: what is found, what is drawn, and the page as a browser shows it."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from measure.sweep_cells import WORK, row

from stepgraph.cli.report import run_report
from stepgraph.measure.curve import LatencyCurve, curve_result
from stepgraph.measure.report.drawing import Spread, draw_lines, draw_spreads
from stepgraph.measure.report.find import find_results, tables_of
from stepgraph.measure.report.page import make_page
from stepgraph.measure.report.pictures import draw_result
from stepgraph.measure.report.summary import gains
from stepgraph.measure.result import Figure, Result, write_result
from stepgraph.measure.sweep.cells import Cell, make_cells
from stepgraph.measure.sweep.measure_cell import failed_row
from stepgraph.measure.sweep.rows_file import RowsFile
from stepgraph.runtime import ConfigError

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
BENCH = Result(
    "bench",
    "Steps of <a model> & another.",
    [
        Figure("graphs: per token", "ms", "a step", [1.0, 1.1, 1.2]),
        Figure("eager: per token", "ms", "a step", [2.0, 2.1, 2.2]),
        Figure("eager / graphs", "", "time per token", [2.0, 1.9]),
    ],
    notes=["Bound by <the host>."],
)
CURVE = curve_result(LatencyCurve({1: [1.0, 1.1], 8: [1.5, 1.6], 64: [3.0]}, "a step"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of every form, pictures, and files that are none."""
    write_result(BENCH.to_json(), tmp_path)
    write_result(CURVE.to_json(), tmp_path / "below")
    sweep = RowsFile(tmp_path / "sweep.jsonl")
    for cell in make_cells(["full", "disabled"], rows=[1, 4]):
        sweep.add(row(WORK, cell))
    sweep.add(failed_row(WORK, Cell("breakable", None, None, 1), "no room"))
    (tmp_path / "below" / "curve.png").write_bytes(PNG)
    (tmp_path / "loose.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect/></svg>')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"name": "x"}')
    odd = {**BENCH.to_json(), "tables": [{"title": "t"}]}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    (tmp_path / "lines.jsonl").write_text("{}\n")
    return tmp_path


def test_what_is_found_and_what_is_left_out(folder: Path) -> None:
    found = find_results(folder)
    assert [str(each.path) for each in found.results] == ["below/curve.json", "bench.json", "sweep.jsonl"]
    assert [str(path) for path in found.pictures] == ["below/curve.png", "loose.svg"]
    assert {str(path) for path in found.left_out} == {
        "broken.json", "list.json", "other.json", "odd.json", "lines.jsonl",
    }  # fmt: skip
    assert [str(path) for path in found.pictures_of(found.results[0])] == ["below/curve.png"]


def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"odd\xff.json")
    (tmp_path / name).write_text(
        json.dumps(curve_result(LatencyCurve({1: [1.0]}, "half a \ud800 character")).to_json())
    )
    for as_json in (False, True):
        run_report(tmp_path, tmp_path / "page.html", as_json=as_json)
        assert "odd?.json" in (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "page.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": None},
        {"columns": [None]},
        {"tables": [{"columns": [], "rows": []}]},
        {"tables": [{"title": "", "columns": [], "rows": [], "definitions": {"a": 1}}]},
        {"columns": ["figure", "x"], "rows": [["eager / graph", 1]], "tables": [{"title": 1}]},
        {"curve": {"what": "", "samples": {"1": [float("inf")]}}},
        {"cells": [{"work": {}, "cell": {}}]},
    ],
)
def test_an_odd_result_is_left_out_and_the_page_made(folder: Path, changes: dict[str, Any]) -> None:
    sound = json.loads((folder / "bench.json").read_text())
    (folder / "strange.json").write_text(json.dumps({**sound, **changes}))
    found = find_results(folder)
    assert Path("strange.json") in found.left_out and "strange.json" in make_page(found)


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no result"):
        find_results(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        find_results(tmp_path / "nowhere")


def test_a_table_that_stands_for_the_figures_is_told_once() -> None:
    assert [table["title"] for table in tables_of(CURVE.to_json())] == ["latency curve"]
    assert len(tables_of(BENCH.to_json())) == 1


def test_every_comparison_with_eager_is_summed_up(folder: Path) -> None:
    told = [(gain.step, gain.graphs, gain.times) for gain in gains(find_results(folder).results)]
    assert told == [
        ("time per token", "graphs", "1.95 (1.90 to 2.00)"),
        ("decode, rows 1", "full, reference, reference", "2.00"),
        ("decode, rows 4", "full, reference, reference", "2.00"),
    ]


@pytest.mark.parametrize("medians", [(1.0, 2.0), (0.001, 500.0), (-3.0, -3.0), (0.0, 0.0), (-1.0, 4.0), (7.0, 7.0)])
def test_spreads_stay_inside_of_their_picture(medians: tuple[float, ...]) -> None:
    drawn = draw_spreads("t < u", "ms", [Spread(f"a & {m}", m, m, m) for m in medians])
    picture = ET.fromstring(drawn)
    places = [float(circle.attrib["cx"]) for circle in picture.iter("circle")]
    assert len(places) == 2 and all(math.isfinite(place) and 250 <= place <= 760 for place in places)
    assert places == sorted(places) and "t < u" in "".join(picture.itertext())


def test_lines_stay_inside_of_their_picture() -> None:
    picture = ET.fromstring(draw_lines("t", "x", "y", {"one": [(1, 2.0), (512, 90.0)], "two": [(1, 0.0)]}))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in picture.iter("circle")]
    assert len(dots) == 3 and all(70 <= x <= 760 and 14 <= y <= 274.1 for x, y in dots)


def test_what_is_drawn_of_a_result() -> None:
    assert len(draw_result(BENCH.to_json())) == 1  # two times; a ratio alone is no picture
    assert len(draw_result(CURVE.to_json())) == 2
    odd: dict[str, Any] = BENCH.to_json()
    odd["rows"] = [[float("nan") if isinstance(cell, float) else cell for cell in line] for line in odd["rows"]]
    assert draw_result(odd) == []


class Page(HTMLParser):
    """Counts elements, and refuses any that is not closed or fetches something."""

    VOID = ("meta", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith(("data:", "#"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(folder: Path) -> None:
    page, text = Page(), make_page(find_results(folder))
    page.feed(text)
    assert not page.open and "script" not in page.seen
    assert page.seen.count("img") == 2 and page.seen.count("svg") == 2  # the curve has a picture beside it
    assert "Steps of &lt;a model&gt; &amp; another." in text and "Bound by &lt;the host&gt;." in text
    assert "no room" in text and "lines.jsonl" in text


def test_a_browser_draws_every_picture(folder: Path) -> None:
    """In headless Chromium, as the machine has it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    path, errors = folder / "report.html", []
    path.write_text(make_page(find_results(folder)), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1100, "height": 1400})
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url[:80]))
        page.goto(path.as_uri())
        images = page.evaluate("[...document.images].map(image => image.complete && image.naturalWidth > 0)")
        drawn = page.evaluate("[...document.querySelectorAll('svg')].map(svg => [svg.getBoundingClientRect().width,"
                              " svg.getBBox().width, svg.viewBox.baseVal.width])")  # fmt: skip
        wide = page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        chromium.close()
    assert errors == [] and images == [True, True] and wide
    assert len(drawn) == 2 and all(shown > 100 and 100 < content <= box for shown, content, box in drawn)
