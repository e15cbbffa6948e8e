"""`stepgraph tune allreduce`, as far as it goes without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.cli import ranks as ranks_module
from stepgraph.cli.app import app
from stepgraph.comm.ranks import Ranks
from stepgraph.comm.thresholds import Table, Thresholds
from stepgraph.measure.all_reduce.draw import draw


def test_one_process_has_nothing_to_tune(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "allreduce", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "needs two ranks or more" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")
def test_without_gpus_it_says_what_works_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "launch", lambda world: pytest.fail("ranks were started"))
    done = CliRunner().invoke(app, ["tune", "allreduce", "--tp", "2", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "2 ranks want a GPU each of this node, which has 0" in done.output
    assert "tune on a node that has more" in done.output and "--device cpu" not in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")
def test_so_does_a_rank_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Ranks(1, 2, 1, 2, "127.0.0.1", 1).environment().items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["tune", "allreduce", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "tune on a node that has more" in done.output


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    limits = Thresholds(1024, 1024, 4096)
    times = {size: {("one_shot_push", True): [2.0], ("library", False): [9.0, 8.0]} for size in (1024, 4096)}
    draw(times, Table("a card", 2, limits, limits, "a test"), tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
