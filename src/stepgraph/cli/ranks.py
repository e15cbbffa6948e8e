"""Commands on several ranks: started here with --tp, or by torchrun."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.comm.group import Group

_GRACE_S = 10.0  # for ranks to end by themselves once one has failed
_BAD_INPUT = 2  # the exit code of an error that was told in one line
_INTERRUPTED = 130  # the exit code of a KeyboardInterrupt
_HELD_BY_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"  # the ranks' store: set by torchrun, and by `launch`
_LAUNCHER = "STEPGRAPH_LAUNCHER"  # the process `launch` runs in
_PARENT = os.getppid()  # of torchrun's ranks, which are not told: whoever it was as this process began
_PR_SET_PDEATHSIG = 1


@contextmanager
def joined(tp: int | None, device: str | None, *, fewer: str) -> Iterator[Group | None]:
    """This process's group, where a launcher has started it as a rank; None where it runs alone. fewer: see
    `require_gpus`.

    Raises:
        ConfigError: another number of ranks than --tp says, or more than GPUs. CommError: the ranks do not come
            together.
    """
    if not _is_rank(os.environ):
        yield None
        return
    if _HELD_BY_LAUNCHER in os.environ:
        end_with_parent()
    from stepgraph.comm.group import Group
    from stepgraph.comm.ranks import Ranks
    from stepgraph.runtime.errors import ConfigError

    ranks = Ranks.of(os.environ)
    assert ranks is not None
    if tp not in (None, ranks.world):
        raise ConfigError(f"--tp is {tp}, and the launcher has started {ranks.world} ranks; leave --tp out")
    device = default_device(device)
    require_gpus(ranks.local_world, device, fewer)
    with Group(ranks, device) as group:
        yield group


def require_gpus(ranks: int, device: str, fewer: str) -> None:
    """Each rank of a node has a GPU of its own, where the device is cuda.

    Raises:
        ConfigError: there are not so many; `fewer` says what to do.
    """
    import torch

    from stepgraph.runtime.errors import ConfigError

    there = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > there:
        raise ConfigError(f"{ranks} ranks want a GPU each of this node, which has {there}; {fewer}")


def end_with_parent() -> None:
    """A launcher that is killed cannot end its ranks, which would hold their GPUs; so the kernel does, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if int(os.environ.get(_LAUNCHER, _PARENT)) != os.getppid():  # it died before: the kernel has nothing to tell
            os.kill(os.getpid(), signal.SIGTERM)


def must_launch(tp: int) -> bool:
    """Whether this process is to start the ranks rather than be one.

    Raises:
        ConfigError: no rank at all.
    """
    from stepgraph.runtime.errors import ConfigError

    if tp < 1:
        raise ConfigError(f"--tp is {tp}; at least one rank must compute")
    return tp > 1 and not _is_rank(os.environ)


def launch(world: int, command: Sequence[str] | None = None) -> int:
    """Run a command once a rank, on this machine. Returns the exit code: 1 where a signal has ended a rank, 130 where
    one was interrupted, else that of the first that failed, or 0.

    command: by default this process's own.

    Rank 0 has standard input, output and error. What the others say of an error is held back until all have ended, and
    not said at all where rank 0 has: it knows theirs, and they its. Once a rank has failed the others have ten seconds
    to end.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from stepgraph.comm.ranks import Ranks

    # Here and not on rank 0: what the ranks say about each other must outlive each of them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
    if command is None:
        command = [sys.executable, "-m", "stepgraph", *sys.argv[1:]]
    processes, others = [], []
    for rank in range(world):
        ranks = Ranks(rank, world, rank, world, "127.0.0.1", store.port)
        environment = {**os.environ, **ranks.environment(), _HELD_BY_LAUNCHER: "True", _LAUNCHER: str(os.getpid())}
        apart, errors = (None, None) if rank == 0 else (subprocess.DEVNULL, subprocess.PIPE)
        processes.append(subprocess.Popen(command, env=environment, stdin=apart, stdout=apart, stderr=errors))
        if rank:
            others.append(_Said(processes[-1]))
    try:
        code = _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    errors_of_others = [line for said in others for line in said.errors()]
    if processes[0].returncode != _BAD_INPUT:
        for line in dict.fromkeys(errors_of_others):
            print(line, file=sys.stderr)
    return code


class _Said:
    """What a rank other than the first writes to standard error: passed on, but for errors in one line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._errors = process, list[str]()
        self._thread = threading.Thread(target=self._read, name="stepgraph-said", daemon=True)
        self._thread.start()

    def errors(self) -> list[str]:
        """Once the rank has ended."""
        self._thread.join(timeout=_GRACE_S)  # a process that the rank has left behind may hold the pipe
        return self._errors

    def _read(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith("error: "):
                self._errors.append(line)
            else:
                sys.stderr.write(f"{line}\n")  # whole: another rank's may come before what `print` ends it with
                sys.stderr.flush()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """The exit code. A rank that a signal has ended decides it, or one that was interrupted, whichever was seen to end
    first: another that hears of it may be gone before it is."""
    failed: int | None = None
    until = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
        if failed is None:
            failed = next((process.returncode for process in processes if process.poll()), None)
            if failed is not None:
                until = time.monotonic() + _GRACE_S
    codes = [process.poll() or 0 for process in processes]
    for rank, code in enumerate(codes):
        if code < 0:
            print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    if min(codes) < 0:
        return 1
    if _INTERRUPTED in codes:
        return _INTERRUPTED
    return failed or next((code for code in codes if code), 0)


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
