"""`stepgraph tune allreduce`, as far as it goes without GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.cli.app import app
from stepgraph.comm.thresholds import Table, Thresholds
from stepgraph.measure.all_reduce.draw import draw


def test_one_process_has_nothing_to_tune(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "allreduce", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "needs two ranks or more" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")
def test_without_gpus_the_ranks_say_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepgraph", "tune", "allreduce", "--tp", "2", "--out", str(tmp_path)]
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 2
    assert "wants GPU 0 of its node, which has 0" in done.stderr and "Traceback" not in done.stderr


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    limits = Thresholds(1024, 1024, 4096)
    times = {size: {("one_shot_push", True): [2.0], ("library", False): [9.0, 8.0]} for size in (1024, 4096)}
    draw(times, Table("a card", 2, limits, limits, "a test"), tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
