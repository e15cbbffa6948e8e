"""Our all-reduces on the GPUs of one node (all_reduce.cu), over torch's symmetric memory."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from itertools import product

import torch

from stepgraph.comm.choice import Algorithm, Choice, Facts, Source
from stepgraph.comm.cuda_ipc import CudaIpc
from stepgraph.comm.eligible import MOST_RANKS, why_no_kernels, why_no_rows
from stepgraph.comm.errors import CommError
from stepgraph.comm.group import Group
from stepgraph.comm.pointer_rows import PointerRows
from stepgraph.comm.thresholds import Table
from stepgraph.ops.nvrtc import CudaKernel
from stepgraph.ops.overlap import can_overlap
from stepgraph.runtime.platforms.capturing import is_capturing

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EAGER = (
    (Algorithm.PUSH, Source.PUSHED),
    (Algorithm.PULL, Source.STAGED),
    (Algorithm.TWO_SHOT, Source.STAGED),
)
_NAMES = ("one_shot_push", "one_shot_pull", "two_shot_pull")
_VECTOR = 16  # bytes
_ROOM = 16 << 20  # bytes of a push slot and of the staging buffer, at most: SGLang's default
_ROWS = 1 << 14
_PULL_BLOCKS, _PULL_THREADS = 64, 512
_LEAST_THREADS, _MOST_THREADS = 64, 512  # of a push block
_ALIGN = 256
_EAGER_PATIENCE = 6
_GATHERED, _GATHER_BLOCKS, _GATHER_THREADS = 1 << 16, 16, 256  # words of a rank, at most


class SymmetricKernels:
    """Push and pull of one group, its workspace and its pointer table. `Kernels` for `AllReduce`.

    One symmetric allocation a rank holds the flags of the barriers, two sets of push slots, two of a gather, and the
    staging buffer.

    limit_s: seconds that a captured kernel waits for a rank; NCCL's watchdog does not see what graphs wait for. An
    eager one waits six times as long, since in warm-ups one rank may compile for longer than another.

    Raises:
        CommError: the group cannot have them; see `why_no_kernels`.
    """

    def __init__(self, group: Group, table: Table, *, limit_s: float = 10.0) -> None:
        reason = why_no_kernels(group)
        if reason is not None:
            raise CommError(f"all-reduce kernels: {reason}")
        self._group, self._world, device = group, group.world, group.device
        self._limit_s = limit_s
        self._overlap = can_overlap(device)
        self._push_blocks = torch.cuda.get_device_properties(device).multi_processor_count
        push = min(max(table.captured.push, table.eager.push), _ROOM)
        stage = min(max(table.eager.two_shot, table.eager.pull), _ROOM)
        self._slot_bytes, self._stage_bytes = _rounded(max(push, 1)), _rounded(max(stage, 1))
        self._slots = _rounded(_PULL_BLOCKS * 2 * self._world * 4)
        self._pairs = self._slots + 2 * self._world * self._slot_bytes
        self._stage = self._pairs + 2 * self._world * _GATHERED * 8
        self._workspace = _symmetric(self._stage + self._stage_bytes, device)
        self._peers = _addresses(self._workspace, group)
        blocks = self._push_blocks + _PULL_BLOCKS + _GATHER_BLOCKS
        self._turns = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._told_here = self._told.numpy()
        self._ipc, self._rows = CudaIpc(), PointerRows(group.rank, _ROWS)
        self._table = torch.zeros(_ROWS, self._world, dtype=torch.int64, device=device)
        self._table[0] = torch.tensor([peer + self._stage for peer in self._peers], dtype=torch.int64)
        torch.cuda.synchronize(device)
        self.facts = Facts(
            capturing=False,
            no_rows=why_no_rows(group, self._ipc),
            no_multicast="this package leaves NVLink multicast off",
            push_bytes=push,
            stage_bytes=stage,
        )
        self._try_all()

    def unfit(self, x: torch.Tensor) -> str | None:
        if x.dtype not in _KINDS:
            return f"{x.dtype} is not float32, bfloat16 or float16"
        if not x.is_contiguous():
            return "the tensor is not contiguous"
        if x.numel() * x.element_size() % _VECTOR or x.data_ptr() % _VECTOR:
            return f"its bytes or its address are no multiple of {_VECTOR}"
        if x.numel() >= 2**31:
            return "it has more elements than 31 bits count"
        return None

    def run(self, choice: Choice, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if choice.algorithm is Algorithm.MULTICAST:
            raise CommError(f"all-reduce by multicast: {self.facts.no_multicast}")
        if residual is not None and self.unfit(residual) is not None:
            return self.run(choice, x, None).add_(residual)
        if choice.algorithm is Algorithm.PUSH:
            self._launch("one_shot_push", x, x, residual, row=None)
            return x
        nbytes = x.numel() * x.element_size()
        if choice.source is Source.ROW:
            row = self._rows.take(x.data_ptr(), nbytes, capturing=is_capturing(x.device))
            if choice.algorithm is Algorithm.PULL:
                out = torch.empty_like(x)
                self._launch("one_shot_pull", x, out, residual, row)
                return out
            self._launch("two_shot_pull", x, x, residual, row)
            return x
        staged = self._workspace[self._stage : self._stage + nbytes].view(x.dtype).view(x.shape)
        staged.copy_(x)
        if choice.algorithm is Algorithm.PULL:
            self._launch("one_shot_pull", staged, x, residual, row=0)  # peers read the staged copy: x may be written
            return x
        self._launch("two_shot_pull", staged, staged, residual, row=0)
        return x.copy_(staged)

    def gathers(self, tensor: torch.Tensor) -> bool:
        # An empty one would not line the ranks up, which a second set of slots needs.
        return tensor.element_size() == 4 and tensor.is_contiguous() and 0 < tensor.numel() <= _GATHERED

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self._world, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        turns = self._turns.data_ptr() + 4 * (self._push_blocks + _PULL_BLOCKS)
        params = self._params(tensor, out, None, None, turns, (self._pairs, _GATHERED * 8), tensor.numel())
        kernel = _kernel("small_gather", self._world, 0, self._overlap, tensor.device)
        kernel.launch((_GATHER_BLOCKS, 1, 1), _GATHER_THREADS, params, overlap=self._overlap)
        return out

    def exchange(self) -> None:
        first, rows = self._rows.exchange(self._group.exchange, self._ipc)
        if rows:
            self._table[first : first + len(rows)] = torch.tensor(rows, dtype=torch.int64)
            torch.cuda.synchronize(self._group.device)  # a replay that overlaps the kernel in front must see them too

    def check(self) -> None:
        if self._told_here[0]:
            raise CommError(
                f"rank {self._group.rank}: an all-reduce waited too long for rank {self._told_here[0] - 1}, which is "
                f"gone, late, or runs another step; its result is wrong"
            )

    def close(self) -> None:
        """Unmap peers' memory: after the last replay, and while that memory is still there."""
        torch.cuda.synchronize(self._group.device)
        self._ipc.close()

    def _try_all(self) -> None:
        """Load every kernel, which a capture does not allow, and see that each sums. On all ranks alike.

        Raises:
            CommError: one gives another sum.
        """
        for name, kind in product(_NAMES, _KINDS.values()):
            _kernel(name, self._world, kind, self._overlap, self._group.device)
        _kernel("small_gather", self._world, 0, self._overlap, self._group.device)
        self._group.exchange(None)  # compiled on all ranks
        mine = torch.full((3,), self._group.rank, dtype=torch.int32, device=self._group.device)
        gathered = self.gather(mine).tolist()
        if gathered != [[rank] * 3 for rank in range(self._world)]:
            raise CommError(f"gather: {self._world} ranks gather their numbers to {gathered}")
        for dtype in _KINDS:
            for algorithm, source in _EAGER:
                ones = torch.ones(_VECTOR // dtype.itemsize, dtype=dtype, device=self._group.device)
                found = self.run(Choice(algorithm, source, "tried"), ones, None).tolist()
                self.check()
                if found != [self._world] * len(found):
                    raise CommError(f"all-reduce by {algorithm}: {self._world} ranks sum ones in {dtype} to {found}")

    def _launch(
        self, name: str, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, row: int | None
    ) -> None:
        vectors = x.numel() * x.element_size() // _VECTOR
        if row is None:
            blocks, turns = self._push_blocks, self._turns.data_ptr()
            threads = min(max(-(-vectors // blocks // 32) * 32, _LEAST_THREADS), _MOST_THREADS)
        else:
            share = vectors if name == "one_shot_pull" else -(-vectors // self._world)
            blocks, threads = min(max(-(-share // _PULL_THREADS), 1), _PULL_BLOCKS), _PULL_THREADS
            turns = self._turns.data_ptr() + 4 * self._push_blocks
        params = self._params(x, out, residual, row, turns, (self._slots, self._slot_bytes), vectors)
        kernel = _kernel(name, self._world, _KINDS[x.dtype], self._overlap, x.device)
        overlap = self._overlap and row != 0  # behind a staging copy there is no kernel to overlap with
        kernel.launch((blocks, 1, 1), threads, params, overlap=overlap)

    def _params(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        row: int | None,
        turns: int,
        slots: tuple[int, int],
        count: int,
    ) -> _Params:
        limit_s = self._limit_s * (1 if is_capturing(x.device) else _EAGER_PATIENCE)
        return _Params(
            x.data_ptr(), out.data_ptr(), 0 if residual is None else residual.data_ptr(),
            0 if row is None else self._table.data_ptr() + row * self._world * 8,
            (ctypes.c_ulonglong * MOST_RANKS)(*self._peers),
            turns, self._failed.data_ptr(), self._told.data_ptr(),
            0, *slots, int(limit_s * 1e9), count, self._group.rank,
        )  # fmt: skip


def _symmetric(nbytes: int, device: torch.device) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def _addresses(workspace: torch.Tensor, group: Group) -> list[int]:
    """Of every rank's workspace, zeroed everywhere: a slot of zeros is an empty one.

    The handle knows allocations, and torch may hand out a part of one.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(workspace, group.name)
    workspace.zero_()
    torch.cuda.synchronize(group.device)
    bases = list(handle.buffer_ptrs)
    offsets = group.exchange(workspace.data_ptr() - bases[group.rank])  # nobody writes before all have zeroed
    return [base + offset for base, offset in zip(bases, offsets, strict=True)]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "output", "residual", "row")),
        ("workspace", ctypes.c_ulonglong * MOST_RANKS),
        *((name, ctypes.c_void_p) for name in ("turns", "failed", "told")),
        *((name, ctypes.c_ulonglong) for name in ("signals", "slots", "slot_bytes", "limit_ns")),
        *((name, ctypes.c_uint) for name in ("vectors", "rank")),
    ]


@cache
def _kernel(name: str, world: int, kind: int, overlap: bool, device: torch.device) -> CudaKernel:
    source = files("stepgraph.comm").joinpath("all_reduce.cu").read_text(encoding="utf-8")
    return CudaKernel(source, name, {"WORLD": world, "KIND": kind, "OVERLAP": overlap})
