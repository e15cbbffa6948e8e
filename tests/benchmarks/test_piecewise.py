"""The benchmark of compiled pieces: its parts make a result that can be rendered."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def part(case: str) -> dict[str, Any]:
    pairs = [(1.0, 2.0), (1.5, 2.0)]
    compiled = {"compile seconds": 3.0, "capture seconds": 4.0, "pieces": 33, "distinct": 3}
    return {
        "case": case,
        "captures": {"reference, breakable, compiled": compiled},
        "samples": {"fused, full": pairs, "reference, eager": pairs},
        "machine": "a machine",
        "versions": {"torch": "2.13"},
        "commit": "abc",
    }


def test_parts_are_one_result(benchmark: Callable[[str], ModuleType]) -> None:
    result = benchmark("h200_piecewise").merge([part("decode-1"), part("prefill-16")])
    assert set(benchmark("render_tables").FIELDS) <= set(result)
    assert [row[0] for row in result["rows"]] == ["decode of 1", "prefill of 16"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    assert list(result["samples"]) == ["decode-1", "prefill-16"] and "samples" not in result["parts"][0]
