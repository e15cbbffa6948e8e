"""Memory of torch's allocator made known to other processes of the node, through the driver's IPC handles."""

from __future__ import annotations

import ctypes
from typing import Any

from stepgraph.comm.errors import CommError
from stepgraph.runtime.platforms.cuda_bindings import result_of

_HANDLE_BYTES = 64


class CudaIpc:
    """Exports and opens allocations of the current device. Needs allocations of cudaMalloc, which torch's are unless
    its segments are expandable."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._opened: dict[bytes, int] = {}

    def export(self, address: int) -> tuple[bytes, int]:
        """See `PeerMemory`. Raises CommError: the driver does not export this memory."""
        base, _ = self._call("cuMemGetAddressRange", address)
        handle = self._call("cuIpcGetMemHandle", int(base))
        # Through its address: the bindings' name for its bytes changes with their version.
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES), address - int(base)

    def open(self, handle: bytes) -> int:
        """See `PeerMemory`. Raises CommError: the driver does not open it."""
        if handle not in self._opened:
            peer = self._driver.CUipcMemHandle()
            ctypes.memmove(int(peer.getPtr()), handle, _HANDLE_BYTES)
            flag = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
            self._opened[handle] = int(self._call("cuIpcOpenMemHandle", peer, flag))
        return self._opened[handle]

    def close(self) -> None:
        while self._opened:
            self._call("cuIpcCloseMemHandle", self._opened.popitem()[1])

    def _call(self, name: str, *arguments: Any) -> Any:
        return result_of(getattr(self._driver, name)(*arguments), CommError, name)
