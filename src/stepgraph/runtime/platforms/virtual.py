"""Address ranges whose memory comes and goes while their addresses stay, so that graphs which use them stay right."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

PIECE = 64 << 20
"""Bytes that are mapped, and later given back, as one. A device takes some microseconds for each."""


class VirtualMemory(Protocol):
    """A device's virtual memory. Addresses and sizes are in bytes and multiples of `granularity`."""

    device: torch.device
    granularity: int

    def reserve(self, nbytes: int) -> int:
        """An address range without memory.

        Raises:
            torch.OutOfMemoryError: no range of this length.
        """

    def map(self, address: int, nbytes: int) -> None:
        """Put new memory behind a part of a range that has none. What it holds is undefined.

        Raises:
            torch.OutOfMemoryError: no room; nothing is mapped.
        """

    def allow_access(self, address: int, nbytes: int) -> None:
        """Let the device read and write what is mapped there."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Give the memory back of what one or more whole calls of `map` mapped there."""

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back that has no memory any more."""

    def synchronize(self) -> None:
        """Wait until the device has finished everything submitted."""

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """uint8 [nbytes] over a range whose start is mapped; its storage keeps `owner` alive."""


class VirtualRange:
    """A range of addresses with memory behind its first `mapped` bytes.

    It lives as long as any tensor over it, even after the object itself is gone; then the device is waited for and
    memory and addresses are given back.

    nbytes: of the whole range, rounded up to the granularity. Nothing is mapped yet.

    Raises:
        torch.OutOfMemoryError: no range of this length.
    """

    def __init__(self, memory: VirtualMemory, nbytes: int, *, piece: int = PIECE) -> None:
        self._memory = memory
        self._piece = _round_up(piece, memory.granularity)
        self.nbytes = _round_up(nbytes, memory.granularity)
        self.address = memory.reserve(self.nbytes)
        self._owner = _Owner(memory, self.address, self.nbytes)

    @property
    def mapped(self) -> int:
        """Bytes from the start that have memory behind them."""
        return self._owner.mapped

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the whole range. What is not mapped must not be touched; the start must be."""
        return self._memory.tensor(self.address, self.nbytes, self._owner)

    def grow(self, nbytes: int) -> None:
        """Map up to `nbytes` from the start, rounded up to the granularity. New memory is zeroed, and the
        device waited for.

        Raises:
            torch.OutOfMemoryError: no room; what was mapped stays, and nothing is added to it.
            ValueError: more than the range.
        """
        memory, pieces, start = self._memory, self._owner.pieces, self.mapped
        target = _round_up(nbytes, memory.granularity)
        if target > self.nbytes:
            raise ValueError(f"{nbytes} bytes asked of a range of {self.nbytes}")
        if target <= start:
            return
        held = len(pieces)
        try:
            while self.mapped < target:
                piece = min(self._piece, target - self.mapped)
                memory.map(self.address + self.mapped, piece)
                pieces.append(piece)
            memory.allow_access(self.address + start, target - start)
        except BaseException:
            self._drop(held)
            raise
        self.tensor()[start:target].zero_()
        memory.synchronize()  # the next step may run on any stream

    def shrink(self, nbytes: int) -> None:
        """Give back what lies behind the first `nbytes`, piece by piece: less than one piece more stays mapped.

        The device is waited for. Graphs that go on using what was given back break the whole process.
        """
        pieces, kept, end = self._owner.pieces, 0, 0
        while kept < len(pieces) and end < nbytes:
            end += pieces[kept]
            kept += 1
        self._drop(kept)

    def _drop(self, kept: int) -> None:
        """Unmap all but the first `kept` pieces."""
        pieces = self._owner.pieces
        if kept == len(pieces):
            return
        start = sum(pieces[:kept])
        self._memory.synchronize()
        self._memory.unmap(self.address + start, sum(pieces) - start)
        del pieces[kept:]


class _Owner:
    """What a range holds; goes with the last of the range and the tensors over it."""

    def __init__(self, memory: VirtualMemory, address: int, nbytes: int) -> None:
        self.pieces: list[int] = []  # bytes mapped by each call, in order
        give_back = weakref.finalize(self, _give_back, memory, address, nbytes, self.pieces)
        give_back.atexit = False  # the end of the process gives everything back, and torch may be gone by then

    @property
    def mapped(self) -> int:
        return sum(self.pieces)


def _give_back(memory: VirtualMemory, address: int, nbytes: int, pieces: list[int]) -> None:
    if pieces:
        memory.synchronize()
        memory.unmap(address, sum(pieces))
    memory.free(address, nbytes)


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
