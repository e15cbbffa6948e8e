"""Figures in a file and on a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepgraph.measure.result import Figure, Result, Rows, write_result
from stepgraph.measure.show import number, show

FIELDS = {"name", "definition", "unit", "machine", "versions", "commit", "columns", "rows", "samples"}
PLACE = {"machine": "one GPU", "versions": {"torch": "2.13.0"}, "commit": "abc"}
LAUNCH = Figure("launch", "µs", "From the call to the kernel's start.", [1.0, 2.0, 3.0])
NODES = Figure.of("nodes", 330, "nodes", "Of one step.")
TABLE = Rows("layers", ["layer", "kernels"], [["layers.0", 10], ["layers.1", None]], {"kernels": "launches of [it]"})


def test_a_file_has_what_the_tables_need() -> None:
    result = Result("launch", "Null kernels.", [LAUNCH, NODES], [TABLE], ["A note."], {"graph": {"a": 1}}, **PLACE)
    told = result.to_json()
    assert set(told) >= FIELDS
    assert told["columns"] == ["figure", "median", "p10", "p90", "low", "high", "unit", "definition"]
    assert told["rows"][0] == ["launch", 2.0, 1.2, 2.8, 1.0, 3.0, "µs", LAUNCH.definition]
    assert told["rows"][1] == ["nodes", 330, None, None, None, None, "nodes", "Of one step."]
    assert told["unit"] == "µs, nodes" and told["samples"]["launch"] == [1.0, 2.0, 3.0]
    assert told["tables"][0]["rows"] == TABLE.rows and told["notes"] == ["A note."] and told["graph"] == {"a": 1}
    assert json.loads(json.dumps(told)) == told


def test_without_figures_the_first_table_is_the_files() -> None:
    told = Result("census", "One step.", tables=[TABLE], **PLACE).to_json()
    assert (told["columns"], told["rows"]) == (TABLE.columns, TABLE.rows)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = write_result(Result("launch", "Null kernels.", [LAUNCH], **PLACE).to_json(), tmp_path / "new")
    assert [p.name for p in path.parent.iterdir()] == ["launch.json"]
    with pytest.raises(TypeError):
        write_result({"name": "launch", "rows": object()}, path.parent)
    assert json.loads(path.read_text(encoding="utf-8"))["name"] == "launch"


def test_every_number_is_shown_with_its_definition(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = Result("launch", "Null [kernels].", [LAUNCH, NODES], [TABLE], ["[A] note."], **PLACE)
    show(result, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("launch")]
    assert all(text in lines[place] for text in ("2.00", "1.20 to 2.80", "1.00 to 3.00", "µs"))
    assert lines[place + 1].strip() == LAUNCH.definition
    text = "\n".join(lines)
    assert "Null [kernels]." in text and "[A] note." in text and "kernels: launches of [it]" in text
    assert "one GPU; torch 2.13.0; commit abc" in text
    show(result, as_json=True)
    assert json.loads(capsys.readouterr().out) == result.to_json()


def test_a_narrow_screen_cuts_nothing_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figure = Figure("a launch", "µs", "word " * 40 + "last.", [12345.0, 67890.0])
    show(Result("launch", "Null kernels.", [figure], **PLACE), as_json=False)
    text = capsys.readouterr().out
    assert text.count("word") == 40 and "last." in text and "17,900 to 62,336" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00012345, "0.000123"), (1.0, "1.00"), (123.4, "123"), (12345.6, "12,346"), (1234, "1,234"),
     (None, "–"), (True, "True"), ("x", "x")],
)  # fmt: skip
def test_numbers(value: object, text: str) -> None:
    assert number(value) == text


def test_units_that_are_none_are_not_listed() -> None:
    figures = [Figure("time", "ms", "a time", samples=[1.0]), Figure("ratio", "", "a ratio", samples=[2.0])]
    assert Result("x", "y", figures=figures).to_json()["unit"] == "ms"
