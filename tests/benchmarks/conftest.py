"""Modules of benchmarks/ and scripts/, which are no packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads one; they import each other as scripts do."""
    for folder in ("benchmarks", "scripts"):
        monkeypatch.syspath_prepend(str(ROOT / folder))

    def load(name: str) -> ModuleType:
        if name in ("h200_peers", "h200_fused"):
            pytest.importorskip("triton")  # our own operations beside them are written in it
        return importlib.import_module(name)

    return load
