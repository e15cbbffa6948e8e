"""The Triton kernels against the reference without a GPU, in a process of their own: Triton reads the variable once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def test_the_triton_kernels_agree_with_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    paths = [str(TESTS.parent / "src"), str(TESTS)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "ops" / "interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
