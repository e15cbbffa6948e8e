"""Handles of memory, with a driver's bindings that say nothing of what a handle holds but where it lies."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepgraph.comm.cuda_ipc import CudaIpc
from stepgraph.comm.errors import CommError

BASE, MAPPED = 0x7F0000000000, 0x7E0000000000
CONTENT = bytes(range(192, 256))


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Handle:
    def __init__(self) -> None:
        self.held = (ctypes.c_ubyte * 64)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.held)


class Driver:
    CUipcMemHandle = Handle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS, BASE, 1 << 21) if address >= BASE else (Result.CUDA_ERROR_INVALID_VALUE, 0, 0)

    def cuIpcGetMemHandle(self, base: int) -> tuple[Any, ...]:
        handle = Handle()
        handle.held[:] = list(CONTENT)
        return Result.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Any, ...]:
        self.opened.append(bytes(handle.held))
        return Result.CUDA_SUCCESS, MAPPED

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        self.closed.append(address)
        return (Result.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver, bindings = Driver(), ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return driver


def test_a_handle_goes_to_a_peer_whole_and_is_opened_once(driver: Driver) -> None:
    ipc = CudaIpc()
    handle, offset = ipc.export(BASE + 4096)
    assert (handle, offset) == (CONTENT, 4096)
    assert ipc.open(handle) == ipc.open(handle) == MAPPED
    assert driver.opened == [CONTENT]
    ipc.close()
    assert driver.closed == [MAPPED]


def test_memory_that_the_driver_does_not_export_is_told(driver: Driver) -> None:
    with pytest.raises(CommError, match="cuMemGetAddressRange: CUDA_ERROR_INVALID_VALUE"):
        CudaIpc().export(16)
