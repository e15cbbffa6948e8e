"""What is asked of CUDA's driver, on a driver that keeps accounts."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgraph.runtime.platforms.cuda_virtual import CudaVirtualMemory
from stepgraph.runtime.platforms.virtual import VirtualRange

MIB = 1 << 20


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """Memory is alive while a handle or a mapping refers to it, as on a device."""

    CUresult = Result
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, room: int) -> None:
        self.room, self.handles, self.mapped = room, dict[int, int](), dict[int, tuple[int, int]]()
        self.ranges, self.contexts, self.fails, self.accessible = dict[int, int](), list[str](), "", 0
        self._next = 0

    CUmemAllocationProp = CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))

    @property
    def used(self) -> int:
        mapped = {handle: size for handle, size in self.mapped.values()}
        return sum({**self.handles, **mapped}.values())

    def cuDevicePrimaryCtxRetain(self, index: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"context {index}"

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.contexts.pop()

    def cuMemGetAllocationGranularity(self, kind: Any, which: int) -> tuple[Any, ...]:
        assert (kind.type, kind.location.type, kind.location.id, which) == (1, 1, 3, 0)
        return Result.CUDA_SUCCESS, 2 * MIB

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[Any, ...]:
        self.ranges[1 << 40] = size
        return Result.CUDA_SUCCESS, 1 << 40

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[Any, ...]:
        assert self.contexts == ["context 3"]
        if self.used + size > self.room:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self._next += 1
        self.handles[self._next] = size
        return Result.CUDA_SUCCESS, self._next

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert self.handles[handle] == size and (offset, flags) == (0, 0)
        if self.fails == "cuMemMap":
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[address] = handle, size
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> tuple[Any, ...]:
        assert count == len(descriptions) == 1 and descriptions[0].flags == 3
        self.accessible += size
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        gone = [a for a in self.mapped if address <= a < address + size]
        assert sum(self.mapped.pop(a)[1] for a in gone) == size
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.ranges.pop(address) == size and not self.mapped
        return (Result.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS,)


class OnTheCpu(CudaVirtualMemory):
    """torch cannot take the addresses here."""

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def made(room: int = 64 * MIB) -> tuple[VirtualRange, Driver]:
    driver = Driver(room)
    return VirtualRange(OnTheCpu(torch.device("cuda", 3), driver), 100 * MIB, piece=8 * MIB), driver


def test_memory_lives_as_long_as_it_is_mapped() -> None:
    space, driver = made()
    space.grow(20 * MIB)
    assert driver.used == driver.accessible == 20 * MIB and not driver.handles
    space.shrink(9 * MIB)
    assert driver.used == 16 * MIB == space.mapped and not driver.contexts
    del space
    assert not driver.used and not driver.ranges


def test_out_of_memory_is_torchs_and_leaves_nothing() -> None:
    space, driver = made(room=16 * MIB)
    space.grow(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="cuda:3 has no room"):
        space.grow(40 * MIB)
    assert driver.used == space.mapped == 2 * MIB and not driver.handles and not driver.contexts


def test_a_mapping_that_fails_leaves_nothing() -> None:
    space, driver = made()
    driver.fails = "cuMemMap"
    with pytest.raises(RuntimeError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE"):
        space.grow(2 * MIB)
    assert not driver.used and not driver.handles and space.mapped == 0
