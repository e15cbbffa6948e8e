"""The streams that captures run on."""

from __future__ import annotations

import threading
import weakref

import torch

from stepgraph.runtime.platforms.cuda_driver import new_stream

_lent = threading.local()  # by device, this thread's
_idle: dict[str, list[torch.cuda.Stream]] = {}  # by device, of threads that have ended


class _Lease:
    """A thread's stream; goes back when the thread ends."""

    def __init__(self, stream: torch.cuda.Stream, idle: list[torch.cuda.Stream]) -> None:
        self.stream = stream
        weakref.finalize(self, idle.append, stream).atexit = False


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this thread captures on a device.

    One for all captures of a thread: cuBLAS keeps a workspace for each (32 MiB on an H200), for good. None is shared
    between threads, which may capture at the same time, nor is it one of those that torch hands out in turn.
    """
    leases, name = _lent.__dict__, str(device)
    if name not in leases:
        idle = _idle.setdefault(name, [])
        leases[name] = _Lease(idle.pop() if idle else _new(device), idle)
    lease: _Lease = leases[name]
    return lease.stream


def _new(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # gives this thread torch's context
        return torch.cuda.ExternalStream(new_stream(), device=device)
