"""A group of processes: collectives on the device's own library, agreement beside it on the CPU, and an orderly end."""

from __future__ import annotations

import os
import pickle
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stepgraph.comm.errors import CommError
from stepgraph.comm.ranks import Ranks
from stepgraph.comm.watch import Watch, end_process

_TIMEOUT = timedelta(minutes=10)  # of agreement between ranks that are alive: loading and capturing take their time
_END_S = 5
_DOING_BYTES = 120  # of what a rank is doing, as it is told to the others
# NVLink multicast can put a host's GPUs out of service, and NCCL that registers the buffers of graphs fails with them
# (SGLang sets the last one too). What the user has set stays.
_LIBRARIES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class Group:
    """The ranks that compute one model together, one process a GPU. One a process.

    ranks: this process among them. store: that all of them reach; by default the launcher's. end: called, from a
    thread, with what happened, where another rank has failed and this one has not ended by itself.

    Raises:
        CommError: ranks that do not come, or a device that is not there.
    """

    def __init__(
        self,
        ranks: Ranks,
        device_type: str,
        *,
        store: dist.Store | None = None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._open = True
        self.ranks, self.rank, self.world = ranks, ranks.rank, ranks.world
        self.device = _device(ranks, device_type)
        on_gpu = self.device.type == "cuda"
        self.library = "nccl" if on_gpu else "gloo"
        if on_gpu:
            for name, value in _LIBRARIES.items():
                os.environ.setdefault(name, value)
            torch.cuda.set_device(self.device)
        with self._naming("start"):
            if store is None:
                store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
                store=dist.PrefixStore("stepgraph", store),
                rank=self.rank,
                world_size=self.world,
                timeout=_TIMEOUT,
                device_id=self.device if on_gpu else None,
            )
            self._data = dist.group.WORLD
            self._control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._watch = Watch(self.rank, self.world, store, ranks.host, end=end)
        self._before_close: list[Callable[[], None]] = []

    @property
    def name(self) -> Any:
        """What torch knows the data group by."""
        assert self._data is not None
        return self._data.group_name

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place, by the library. On a GPU in the order of the current stream."""
        with self._naming("all-reduce"):
            self._watch.collectives += 1
            dist.all_reduce(tensor, group=self._data)

    def gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """The ranks' tensors one behind the other. out: [world, *tensor.shape], contiguous."""
        with self._naming("gather"):
            self._watch.collectives += 1
            _all_gather(out.view(-1), tensor.view(-1), group=self._data)

    def exchange(self, value: Any, doing: str = "exchanging values") -> list[Any]:
        """Every rank's value, in the order of ranks. On the CPU, whatever the device does; pickled, so for few bytes.

        doing: what for, the same on all ranks.

        Raises:
            CommError: a rank has died or given up; or on every rank, where one has come for something else.
        """
        mine = pickle.dumps(value)
        return [pickle.loads(one) for one in self._gather_bytes(mine, self._meet(doing, len(mine)))]

    def share(self, value: Any, doing: str = "sharing a value") -> Any:
        """Rank 0's value, on every rank. doing, errors: as of `exchange`."""
        return self.exchange(value if self.rank == 0 else None, doing)[0]

    def agree(self, what: str, value: Any) -> None:
        """Make sure that all ranks have the same.

        Raises:
            CommError: on every rank, with each one's value; or as `exchange`.
        """
        values = self.exchange(value, f"agreeing on {what}")
        if any(other != values[0] for other in values):
            listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise CommError(f"ranks disagree on {what}: {listed}")

    def same(self, number: int, doing: str = "comparing a number") -> bool:
        """Whether all ranks have the same number, of 63 bits. Quicker than `agree`. Raises CommError as `exchange`."""
        return set(self._meet(doing, number)) == {number}

    def _meet(self, doing: str, number: int) -> list[int]:
        """Every rank's number, of 63 bits, where all do the same. All that ranks say to each other begins so: one that
        comes for something else, or to close, is seen by all instead of waited for."""
        self.check()
        what = zlib.crc32(doing.encode())
        told = torch.empty(self.world, 2, dtype=torch.int64)
        with self._naming(doing), self._watch.waiting(doing):
            _all_gather(told.view(-1), torch.tensor([what, number]), group=self._control)
        whats, numbers = told.T.tolist()
        if set(whats) != {what}:
            text = doing.encode()[:_DOING_BYTES].ljust(_DOING_BYTES)
            texts = self._gather_bytes(text, [_DOING_BYTES] * self.world)
            each = "; ".join(
                f"rank {rank} is {text.decode(errors='ignore').strip()}" for rank, text in enumerate(texts)
            )
            raise CommError(f"ranks do different things: {each}; all must make the same calls in the same order")
        return numbers

    def _gather_bytes(self, mine: bytes, sizes: list[int]) -> list[bytes]:
        padded = torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8)
        told = torch.empty(self.world, max(sizes), dtype=torch.uint8)
        with self._naming("exchange"):
            _all_gather(told.view(-1), padded, group=self._control)
        return [one[:size].numpy().tobytes() for one, size in zip(told, sizes, strict=True)]

    def went_on(self) -> None:
        """A step of graphs is over: of those collectives the host sees no more. See `Watch`."""
        self._watch.collectives += 1

    def check(self) -> None:
        """Raises CommError: a rank has died or given up, or the group is closed."""
        self._require_open()
        self._watch.raise_if_failed()

    def fail(self, why: str) -> None:
        """Tell the others that this rank gives up, so that none waits for it."""
        self._watch.fail(why)

    def before_close(self, release: Callable[[], None]) -> None:
        """Call this before the process group goes: what holds captured collectives must be gone by then.

        Not where a rank has failed: its memory is gone, and this process ends too.
        """
        self._before_close.append(release)

    def released(self, release: Callable[[], None]) -> None:
        """What was to be called `before_close` has been; ranks call nothing twice, and hold nothing for it."""
        if release in self._before_close:
            self._before_close.remove(release)

    def close(self) -> None:
        """End in order: graphs first, the last registered before the others, then the process group.

        Raises:
            CommError: on every rank, where another is not about to close; all end then.
        """
        if not self._open:
            return
        try:
            while self._before_close and self._watch.failure is None:
                self._before_close.pop()()
            if self._watch.failure is None:
                self.exchange(None, "closing the group")  # rank 0 may hold the store that the others still need
        except BaseException as error:
            self.fail(str(error) or type(error).__name__)
            raise
        finally:
            self._open = False
            self._end()

    def _end(self) -> None:
        self._watch.close()
        # gloo's threads must not live on at exit, where they would abort the process. It ends after a failure too,
        # since a rank leaves its operations only once they are over.
        if self._watch.failure is None or self.device.type == "cpu":
            dist.destroy_process_group()
        else:
            signal.alarm(_END_S)  # with a collective that never ends on its device, a process may not come to its end

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """An error on this rank is told to the others; one that comes of theirs says so.

        Raises:
            CommError: in place of what the device says once a rank that it was busy with is gone.
        """
        known = self._watch.failure_soon() if isinstance(error, RuntimeError) else self._watch.failure
        if error is not None and known is None:
            self.fail(_reason(error))
        self.close()
        if known is not None and isinstance(error, RuntimeError):
            raise CommError(f"rank {self.rank} of {self.world}: {known}") from error

    def _require_open(self) -> None:
        if not self._open:
            raise CommError(f"rank {self.rank} of {self.world}: the group is closed; make what needs it inside of it")

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Errors of torch.distributed become ours, with the rank that is behind them where it is known."""
        self._require_open()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            watch = getattr(self, "_watch", None)
            known = None if watch is None else watch.failure_soon()
            reason = known or " ".join(str(error).split())
            raise CommError(f"rank {self.rank} of {self.world}, {what}: {reason}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it left by sys.exit({error.code!r}) while the others had not ended"
    return str(error) or type(error).__name__


def _device(ranks: Ranks, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if ranks.local_rank >= there:
        raise CommError(
            f"rank {ranks.rank} wants GPU {ranks.local_rank} of its node, which has {there}; start fewer, or on the CPU"
        )
    return torch.device("cuda", ranks.local_rank)
