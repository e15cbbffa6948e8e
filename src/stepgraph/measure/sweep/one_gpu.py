"""One cell at a time on a GPU, whoever measures it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def alone_on(device: str) -> Iterator[None]:
    """Wait until no other cell is measured on this process's GPU, then keep it; a CPU is shared.

    The lock is the kernel's and goes with the process, so that an interrupted sweep leaves none behind. Raises OSError
    where its file cannot be made.
    """
    if device != "cuda":
        yield
        return
    with locked(f"stepgraph-gpu-{torch.cuda.get_device_properties(0).uuid}.lock"):
        yield


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of this name in the folder for temporary files."""
    held = os.open(Path(tempfile.gettempdir()) / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
