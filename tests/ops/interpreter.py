"""Runs a script of kernel checks under Triton's interpreter, which must be chosen before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def check_interpreted(script: str) -> None:
    """script: a file beside this one. Skips where triton is missing."""
    pytest.importorskip("triton")
    paths = [str(TESTS.parent / "src"), str(TESTS)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "ops" / script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
