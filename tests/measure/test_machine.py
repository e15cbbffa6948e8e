"""Where a figure comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepgraph.measure import machine


def test_versions_leave_out_what_is_not_installed() -> None:
    found = machine.versions("torch", "no-such-package")
    assert found["torch"] == torch.__version__ and "no-such-package" not in found
    assert "torch" in machine.versions()


def test_the_machine_is_named() -> None:
    assert "cores" in machine.machine()


def test_outside_a_repository_the_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("STEPGRAPH_COMMIT", raising=False)
    assert machine.commit() == "unknown"
    monkeypatch.setenv("STEPGRAPH_COMMIT", "abc")
    assert machine.commit() == "abc"


def test_the_driver_is_read_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build"
    monkeypatch.setattr(machine, "_lines", lambda path: [line, "GCC version: gcc 12.3"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert machine.versions()["driver"] == "580.159.03"
    assert machine.versions()["cuda"] == "13.0"
