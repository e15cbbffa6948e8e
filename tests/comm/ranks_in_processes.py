"""Runs a function on several ranks, each in a process of its own, over gloo and a file."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.comm.group import Group
from stepgraph.comm.ranks import Ranks


@dataclass(frozen=True)
class Ended:
    """How a rank ended. code: of its process. result: of the function, or the error's text."""

    code: int | None
    result: Any
    error: str | None
    seconds: float


def run_ranks(
    world: int, folder: Path, function: Callable[..., Any], *arguments: Any, device: str = "cpu", limit: float = 120.0
) -> list[Ended]:
    """function: of a module, called as function(group, *arguments) inside the group. folder: empty."""
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":  # torch is imported once for all of them
        context.set_forkserver_preload(["torch", "torch.distributed", "stepgraph.engine"])
    started = time.monotonic()
    processes = [
        context.Process(target=_rank, args=(rank, world, folder, function, arguments, device)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    ended = []
    for process in processes:
        process.join(max(0.0, started + limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    for rank, process in enumerate(processes):
        path = folder / f"rank{rank}.pkl"
        result, error, seconds = pickle.loads(path.read_bytes()) if path.exists() else (None, None, limit)
        ended.append(Ended(process.exitcode, result, error, seconds))
    return ended


def results(ended: list[Ended]) -> list[Any]:
    """Of ranks that all ended well."""
    for rank, one in enumerate(ended):
        assert one.error is None and one.code == 0, f"rank {rank}, exit code {one.code}: {one.error}"
    return [one.result for one in ended]


def _rank(
    rank: int, world: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...], device: str
) -> None:
    torch.set_num_threads(1)
    started = time.monotonic()
    ranks = Ranks(rank, world, rank, world, "127.0.0.1", 0)
    result, error = None, None
    path = folder / f"rank{rank}.pkl"

    def end(message: str) -> None:
        path.write_bytes(pickle.dumps((None, f"ended: {message}", time.monotonic() - started)))
        os._exit(3)

    try:
        with Group(ranks, device, store=dist.FileStore(str(folder / "store"), world), end=end) as group:
            result = function(group, *arguments)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        traceback.print_exc()
    path.write_bytes(pickle.dumps((result, error, time.monotonic() - started)))
