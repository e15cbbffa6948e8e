"""Commands on several ranks: started here with --tp, or by torchrun."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepgraph.comm.group import Group

_GRACE_S = 10.0  # for ranks to end by themselves once one has failed
_HELD_BY_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"  # the ranks' store: set by torchrun, and by `launch`
_PR_SET_PDEATHSIG = 1


@contextmanager
def joined(tp: int | None, device: str | None) -> Iterator[Group | None]:
    """This process's group, where a launcher has started it as a rank; None where it runs alone.

    Raises:
        ConfigError: another number of ranks than --tp says. CommError: the ranks do not come together.
    """
    if not _is_rank(os.environ):
        yield None
        return
    if _HELD_BY_LAUNCHER in os.environ:
        end_with_parent()
    import torch

    from stepgraph.comm.group import Group
    from stepgraph.comm.ranks import Ranks
    from stepgraph.runtime.errors import ConfigError

    ranks = Ranks.of(os.environ)
    assert ranks is not None
    if tp not in (None, ranks.world):
        raise ConfigError(f"--tp is {tp}, and the launcher has started {ranks.world} ranks; leave --tp out")
    with Group(ranks, device or ("cuda" if torch.cuda.is_available() else "cpu")) as group:
        yield group


def end_with_parent() -> None:
    """A launcher that is killed cannot end its ranks, which would hold their GPUs; so the kernel does, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def must_launch(tp: int) -> bool:
    """Whether this process is to start the ranks rather than be one.

    Raises:
        ConfigError: no rank at all.
    """
    from stepgraph.runtime.errors import ConfigError

    if tp < 1:
        raise ConfigError(f"--tp is {tp}; at least one rank must compute")
    return tp > 1 and not _is_rank(os.environ)


def launch(world: int) -> int:
    """Run this command once a rank, on this machine. Returns the exit code: of the first rank that failed, or 0.

    Rank 0 has standard input and output. Once a rank has failed the others have ten seconds to end.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from stepgraph.comm.ranks import Ranks

    # Here and not on rank 0: what the ranks say about each other must outlive each of them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    command = [sys.executable, "-m", "stepgraph", *sys.argv[1:]]
    processes = []
    for rank in range(world):
        ranks = Ranks(rank, world, rank, world, "127.0.0.1", store.port)
        environment = {**os.environ, **ranks.environment(), _HELD_BY_LAUNCHER: "True"}
        apart = None if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdin=apart, stdout=apart))
    try:
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    failed: int | None = None
    until = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if failed is None and process.poll():
                failed, until = process.returncode, time.monotonic() + _GRACE_S
                if failed < 0:
                    print(f"error: rank {rank} was ended by signal {-failed}", file=sys.stderr)
    if failed is None:
        failed = next((process.returncode for process in processes if process.poll()), 0)
    return 1 if failed < 0 else failed


def _is_rank(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def leave_at_once(code: int) -> None:
    """Of a rank whose command has failed: end with this code, and tear nothing down. Threads of collectives that are
    cut off while the interpreter ends may abort the process, which would hide what has failed. Else nothing."""
    if not code or not _is_rank(os.environ):
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or never there
            continue
    os._exit(code)
