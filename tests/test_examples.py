"""The examples run as they are, and print what the README says about them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POLICY = """\
13 robots: FULL, 3 padded rows (padded)
14 robots: FULL, 2 padded rows (padded)
9 robots: FULL, 7 padded rows (padded)
64 robots: FULL, 0 padded rows (exact)
"""
STATIC_CACHE = """\
3 at once: FULL, 1 padded rows, 24 tokens each, as generate() has them
1 at once: FULL, 0 padded rows, 24 tokens each, as generate() has them
"""
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_both
def test_policy(device: str) -> None:
    assert run("policy.py", device) == POLICY


@on_both
def test_transformers_static_cache(device: str) -> None:
    pytest.importorskip("transformers")
    assert run("transformers_static_cache.py", device) == STATIC_CACHE


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_thirteen_prompts() -> None:
    lines = (ROOT / "examples" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 13
    assert lines[0] == "What is the capital of France?"
