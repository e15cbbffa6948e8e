"""The README's tables come from result files alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULT = {
    "name": "launch",
    "definition": "Host time of one replay.",
    "unit": "µs",
    "machine": "one GPU",
    "versions": {"torch": "2.13.0"},
    "commit": "0123456789abcdef-dirty",
    "columns": ["nodes", "replay"],
    "rows": [["one", 1.2345], ["many", 12345.6]],
    "samples": [[1.2345], [12345.6]],
}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_tables", ROOT / "scripts" / "render_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_up_to_date(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0, "run `make tables`"


def test_a_table_is_replaced_and_nothing_else(tables: ModuleType) -> None:
    text = "before\n<!-- table:launch -->\nold 9.99\n<!-- /table -->\nafter\n"
    filled = tables.fill(text, {"launch": RESULT})
    assert filled.startswith("before\n<!-- table:launch -->\nHost time of one replay. Unit: µs.\n")
    assert "| one | 1.23 |" in filled and "| many | 12,346 |" in filled and "9.99" not in filled
    assert "torch 2.13.0; commit 0123456789ab-dirty.*" in filled and filled.endswith("<!-- /table -->\nafter\n")
    assert tables.fill(filled, {"launch": RESULT}) == filled


def test_a_table_without_a_result_says_so(tables: ModuleType) -> None:
    assert "Not measured yet" in tables.fill("<!-- table:absent -->\n1.0\n<!-- /table -->", {})


@pytest.mark.parametrize(
    ("change", "complaint"), [({"commit": ...}, "no commit"), ({"rows": [["one"]]}, "1 cells, there are 2 columns")]
)
def test_an_incomplete_result_is_refused(
    tables: ModuleType, tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    result = {key: value for key, value in {**RESULT, **change}.items() if value is not ...}
    (tmp_path / "launch.json").write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        tables.load_results(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0123, "0.0123"), (0.5, "0.500"), (12.345, "12.3"), (999.5, "1000"), (1234.5, "1,234"), (7, "7")],
)
def test_cells(tables: ModuleType, value: float, text: str) -> None:
    assert tables.cell(value) == text
