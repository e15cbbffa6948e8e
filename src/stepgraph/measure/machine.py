"""Where a figure was measured: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
"""Of the repository, where the package is used from one."""

PACKAGES = ("stepgraph", "torch", "triton", "cuda-bindings")
"""What the figures of most commands depend on."""


def machine() -> str:
    """The processor that the steps ran on, and what stands beside it."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} host cores"
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Versions of python and of those of the packages that are installed; of CUDA and its driver where torch has it."""
    found = {"python": platform.python_version()}
    for package in packages or PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        driver = re.search(r"Module .*?\s(\d+\.[\d.]+)", " ".join(_lines("/proc/driver/nvidia/version")))
        if driver is not None:
            found["driver"] = driver[1]
    return found


def commit() -> str:
    """The commit that was measured, with `-dirty` where the tree held more; $STEPGRAPH_COMMIT outside a repository."""
    changes = ["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py"]
    if not (ROOT / ".git").exists():  # or git would look further up
        return os.environ.get("STEPGRAPH_COMMIT", "unknown")
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(changes, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("STEPGRAPH_COMMIT", "unknown")
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
