"""Workspace: scratch memory of kernels, which must stay where graphs have found it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stepgraph.runtime.errors import CaptureError, InputError, ReplayError
from stepgraph.runtime.platforms.source_line import calling_line


class Workspace:
    """Scratch memory by name, each as large as the largest request so far.

    It grows in eager runs and warm-ups. A runner that watches it locks it while it has graphs, for these go on using
    the addresses of the capture.

    generation: goes up whenever memory that was handed out moves.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generation = 0
        self._memory: dict[str, torch.Tensor] = {}
        self._recorded: set[str] = set()  # what a CUDA graph may use; a tape holds its memory itself
        self._left: list[torch.Tensor] = []  # memory of those graphs from before the name grew
        self._locks = 0

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the memory of `name`: zeros when that is new, afterwards whatever was left there.

        Raises:
            ReplayError: locked, and there is less memory than asked for; names the line that asks.
            CaptureError: the same while a CUDA graph is recorded: its memory would be the graph's.
            InputError: a shape that is none.
        """
        if not isinstance(shape, Sequence) or min(shape, default=0) < 0:
            raise InputError(f"the workspace: {name} wants {shape!r}, which is no shape (at {calling_line()})")
        wanted = math.prod(shape) * dtype.itemsize
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        memory = self._memory.get(name)
        if memory is None or memory.numel() < wanted:
            there = 0 if memory is None else memory.numel()
            if self._locks or capturing:
                why = "is locked, since graphs hold its addresses" if self._locks else "cannot grow inside a capture"
                raise (ReplayError if self._locks else CaptureError)(
                    f"the workspace {why}: {name} wants {wanted} bytes for {tuple(shape)} {dtype}, there are {there} "
                    f"(at {calling_line()}); get it at its largest shape before the capture"
                )
            memory = self._grow(name, wanted)
        if capturing:
            self._recorded.add(name)
        return memory[:wanted].view(dtype).view(tuple(shape))

    @property
    def nbytes(self) -> int:
        """What all names hold together."""
        return sum(memory.numel() for memory in self._memory.values())

    @property
    def locked(self) -> bool:
        return self._locks > 0

    def lock(self) -> None:
        """No growth from now on. Locks count: every owner of graphs sets its own and takes it back."""
        self._locks += 1

    def unlock(self) -> None:
        """The graphs of one owner are gone."""
        self._locks = max(self._locks - 1, 0)
        if not self._locks:
            self._recorded.clear()
            self._left.clear()

    def _grow(self, name: str, nbytes: int) -> torch.Tensor:
        left = self._memory.get(name)
        if left is not None:
            self.generation += 1
            if name in self._recorded:
                self._left.append(left)
        with torch.inference_mode(False):  # or it could not be written to outside that mode
            self._memory[name] = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._memory[name]
