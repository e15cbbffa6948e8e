"""Virtual memory of a CPU, for tests: what is not mapped holds NaN, and must go on holding it."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch

UNMAPPED = 0xFF  # NaN in every floating type of torch


class FakeVirtualMemory:
    """Refuses what a driver refuses. capacity: bytes of memory in all.

    mapped: nbytes by address, of every call of `map` that is in force. calls: names of what was called, in order.
    """

    device = torch.device("cpu")

    def __init__(self, capacity: int = 1 << 30, granularity: int = 4096) -> None:
        self.capacity, self.granularity = capacity, granularity
        self.mapped: dict[int, int] = {}
        self.accessible: dict[int, int] = {}
        self.ranges: dict[int, np.ndarray] = {}
        self.calls: list[str] = []
        self._next = 1 << 40

    @property
    def used(self) -> int:
        return sum(self.mapped.values())

    def reserve(self, nbytes: int) -> int:
        self._check(nbytes)
        address, self._next = self._next, self._next + nbytes + self.granularity
        self.ranges[address] = np.full(nbytes, UNMAPPED, dtype=np.uint8)
        return address

    def map(self, address: int, nbytes: int) -> None:
        self._check(address, nbytes)
        self.calls.append("map")
        memory, start = self._at(address)
        assert start + nbytes <= len(memory), "beyond the range"
        assert not any(a < address + nbytes and address < a + n for a, n in self.mapped.items()), "mapped already"
        if self.used + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"{nbytes} of {self.capacity - self.used}")
        self.mapped[address] = nbytes
        memory[start : start + nbytes] = 0x5A  # of whoever had it before

    def allow_access(self, address: int, nbytes: int) -> None:
        assert sum(n for a, n in self.mapped.items() if address <= a < address + nbytes) == nbytes
        self.accessible[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        assert self.calls[-1] == "synchronize", "the device may still be at work there"
        self.calls.append("unmap")
        inside = [a for a in self.mapped if address <= a < address + nbytes]
        assert sum(self.mapped[a] for a in inside) == nbytes, "only whole mappings can go"
        for a in inside:
            del self.mapped[a]
        memory, start = self._at(address)
        memory[start : start + nbytes] = UNMAPPED

    def free(self, address: int, nbytes: int) -> None:
        assert len(self.ranges[address]) == nbytes and not self.used_of(address)
        del self.ranges[address]

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        assert address in self.mapped, "torch asks the driver about the start"
        return torch.from_numpy(np.asarray(_Exported(self.ranges[address], owner)))

    def used_of(self, address: int) -> int:
        end = address + len(self.ranges[address])
        return sum(n for a, n in self.mapped.items() if address <= a < end)

    def untouched(self) -> bool:
        """Whether nobody wrote where nothing is mapped."""
        return all(bool((m[self.used_of(a) :] == UNMAPPED).all()) for a, m in self.ranges.items())

    def _at(self, address: int) -> tuple[np.ndarray, int]:
        starts = sorted(self.ranges)
        start = starts[bisect_right(starts, address) - 1]
        return self.ranges[start], address - start

    def _check(self, *numbers: int) -> None:
        assert all(n % self.granularity == 0 and n > 0 for n in numbers), numbers


class _Exported:
    def __init__(self, memory: np.ndarray, owner: object) -> None:
        self._memory, self._owner = memory, owner
        self.__array_interface__ = memory.__array_interface__
