"""`stepgraph run --adapter`: every prompt has it, and what cannot be loaded is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.one_adapter import write_one_projection

from stepgraph.cli.app import main

OPTIONS = ["--max-tokens", "6", "--device", "cpu", "--ladder", "1", "--json", "What is the capital of France?"]


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run", *argv, *OPTIONS])
    return int(ended.value.code or 0)


def test_every_prompt_has_it(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for strength in (None, 0.0, 1.0):
        argv = [] if strength is None else ["--adapter", write_one_projection(tmp_path, strength)]
        assert call(*argv) == 0
        reports.append(json.loads(capsys.readouterr().out))
    without, nothing, strong = (report["results"][0]["token_ids"] for report in reports)
    assert without == nothing != strong
    assert [report["adapter"] for report in reports] == [None, str(tmp_path), str(tmp_path)]
    assert set(reports[2]["modes"]) == {"FULL"}
    assert any(row["name"] == "adapters" for row in reports[2]["memory"]["rows"])


def test_one_that_is_none_is_one_line(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--adapter", str(tmp_path)) == 2
    assert "adapter_config.json is missing" in capsys.readouterr().err
