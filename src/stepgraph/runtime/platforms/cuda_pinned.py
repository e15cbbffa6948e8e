"""Memory of the host that the device reads and writes, and how the host knows how far the device has come."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CurrentStream:
    """The device's current stream. It is looked up only when it changed: torch's look-up costs as much as a copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._raw = -1

    def __call__(self) -> torch.cuda.Stream:
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if self._stream is None or raw != self._raw:
            self._stream, self._raw = torch.cuda.current_stream(self._device), raw
        return self._stream


class PinnedRing:
    """Two pinned mirrors in turn: one may be rewritten while the copy from the other is still in flight."""

    def __init__(self, host: torch.Tensor, slab: torch.Tensor) -> None:
        self._host = host.numpy()
        self._slab = slab
        self._pinned = [torch.empty(host.numel(), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._bytes = [mirror.numpy() for mirror in self._pinned]
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._turn = 0
        self._current = CurrentStream(slab.device)
        self._spans: dict[
            tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]
        ] = {}  # slicing costs more than a look-up

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        for start, stop in ranges:
            self._bytes[turn][start:stop] = self._host[start:stop]
            if (start, stop) not in self._spans:
                self._spans[start, stop] = (self._slab[start:stop], [p[start:stop] for p in self._pinned])
            target, sources = self._spans[start, stop]
            target.copy_(sources[turn], non_blocking=True)
        self._copied[turn].record(self._current())


class CudaMark:
    """An event on the stream that is current when it is set. asleep: who waits gives its core away."""

    def __init__(self, device: torch.device, *, asleep: bool = False) -> None:
        self._event, self._current = torch.cuda.Event(blocking=asleep), CurrentStream(device)
        self._record = super(torch.cuda.Event, self._event).record  # without the frame of Python around it
        self.wait = super(torch.cuda.Event, self._event).synchronize

    def set(self) -> None:
        self._record(self._current())


class _Mapped:
    """Pinned memory as the device sees it; torch keeps this object, and this one the memory."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def shared_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pinned memory, zeroed, as a tensor of the device and as one of the host.

    Raises:
        RuntimeError: the device does not see pinned memory where the host does.
    """
    with torch.inference_mode(False), torch.cuda.device(device):
        host = torch.zeros(shape, dtype=dtype, pin_memory=True)
        mapped = torch.as_tensor(_Mapped(host), device=device)
    if mapped.data_ptr() != host.data_ptr():
        raise RuntimeError(f"torch {torch.__version__} copied pinned memory instead of taking it over")
    return mapped.view(dtype).view(shape), host


def uploaded(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, through pinned memory that torch takes back once the copy is done."""
    return values.pin_memory().to(device, non_blocking=True)
