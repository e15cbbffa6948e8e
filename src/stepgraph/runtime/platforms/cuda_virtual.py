"""CUDA's virtual memory management, through cuda.bindings."""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.cuda_bindings import load_driver, result_of


def why_no_virtual_memory(device: torch.device) -> str | None:
    """Why the device's memory cannot be mapped piece by piece, or None where it can."""
    if device.type != "cuda":
        return f"device {device} has no virtual memory of its own"
    driver = load_driver()
    if driver is None:
        return "the package cuda.bindings is not installed (pip install stepgraph[cuda])"
    torch.cuda.init()  # the driver answers nothing before
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    error, supported = driver.cuDeviceGetAttribute(attribute, _index(device))
    return None if not int(error) and supported else f"the driver offers no virtual memory on {device}"


def cuda_virtual_memory(device: torch.device) -> CudaVirtualMemory:
    """The virtual memory of a device.

    Raises:
        ConfigError: the device or the machine has none; says why.
    """
    reason = why_no_virtual_memory(device)
    if reason is not None:
        raise ConfigError(f"virtual memory: {reason}")
    return CudaVirtualMemory(torch.device("cuda", _index(device)), load_driver())


class CudaVirtualMemory:
    """Virtual memory of one device. Nothing of it goes through torch's allocator, nor does torch count it.

    Its methods may be called from any thread.
    """

    def __init__(self, device: torch.device, driver: Any) -> None:
        self.device = device
        self._driver = driver
        self._context = self._checked("cuDevicePrimaryCtxRetain", device.index)  # torch's; it lasts as long as torch
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for place in (self._kind.location, self._access.location):
            place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            place.id = device.index
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._kind, smallest))

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def map(self, address: int, nbytes: int) -> None:
        handle = self._call("cuMemCreate", nbytes, self._kind, 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory

    def allow_access(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        tensor: torch.Tensor = torch.as_tensor(_Exported(address, nbytes, owner), device=self.device)
        if tensor.data_ptr() != address:
            raise RuntimeError(f"torch {torch.__version__} copied the memory at {address:#x} instead of taking it over")
        return tensor

    def _call(self, name: str, *arguments: object) -> Any:
        """One function of the driver in the device's context, whichever this thread is in."""
        self._checked("cuCtxPushCurrent", self._context)
        try:
            return self._checked(name, *arguments)
        finally:
            self._checked("cuCtxPopCurrent")

    def _checked(self, name: str, *arguments: object) -> Any:
        """What a function of the driver returns beside its status."""
        answer = getattr(self._driver, name)(*arguments)
        if answer[0] == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: {self.device} has no room")
        return result_of(answer, RuntimeError, f"{name} failed")


class _Exported:
    """Memory as torch takes it over; the tensor's storage keeps this object, and this one the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
