"""Who takes how much of the device's memory, by the device's own figure: what is shown adds up to all it has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from stepgraph.runtime.errors import ConfigError

FRACTION = 0.9
"""Of the device's memory, that this process and all others there may take together."""
MARGIN = 256 << 20
"""Bytes that stay free within it, for what the allocator loses to fragmentation and what libraries load late."""


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    name: str
    total: int

    def free(self) -> int:
        """Free now, with everything submitted finished."""

    def release_cached(self) -> None:
        """Give back what torch holds and nobody uses."""


class CudaMemory:
    """A CUDA device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(device)
        self.total = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def release_cached(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryRow:
    """Bytes, and who has them. Negative where somebody gave back what an earlier row counts."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryTable:
    """The rows, which add up to `total` where the device knows one; otherwise they are what is known.

    fraction: of the total, that may be taken; None where there is none.
    """

    rows: tuple[MemoryRow, ...]
    total: int | None = None
    fraction: float | None = None

    def __getitem__(self, name: str) -> int:
        """The bytes of a row; 0 where there is none of this name."""
        return sum(row.nbytes for row in self.rows if row.name == name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Budget:
    """A device's memory as it is taken, one row after another.

    fraction: of all there is, that this and every other process there may take.

    Raises:
        ConfigError: a fraction that is none.
    """

    def __init__(self, memory: DeviceMemory, fraction: float = FRACTION) -> None:
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {fraction}; it is a share of the device's memory, above 0, at most 1"
            )
        self.memory, self.fraction = memory, fraction
        self._rows: list[MemoryRow] = []
        self._free = memory.total
        self.take("driver, torch, other processes")

    @property
    def allowed(self) -> int:
        """Bytes of the fraction."""
        return int(self.memory.total * self.fraction)

    @property
    def taken(self) -> int:
        """Bytes of all rows so far."""
        return self.memory.total - self._free

    @property
    def spare(self) -> int:
        """Bytes of the fraction that nobody has, less the margin. Negative where there are too few."""
        return self.allowed - self.taken - MARGIN

    def take(self, name: str, *, with_cached: bool = False) -> None:
        """Add a row: what is free now less than at the last one.

        with_cached: what torch holds and nobody uses counts as taken. By default it is given back first.
        """
        if not with_cached:
            self.memory.release_cached()
        free = self.memory.free()
        self._rows.append(MemoryRow(name, self._free - free))
        self._free = free

    def table(self) -> MemoryTable:
        """The rows, and what is left: the margin, what is beyond the fraction, and the rest."""
        outside = self.memory.total - self.allowed
        left = (
            MemoryRow("margin", MARGIN),
            MemoryRow("beyond memory_fraction", outside),
            MemoryRow("unused", self._free - MARGIN - outside),
        )
        return MemoryTable((*self._rows, *left), self.memory.total, self.fraction)


def size(nbytes: float) -> str:
    """A number of bytes in words."""
    return f"{nbytes / 2**30:,.2f} GiB" if abs(nbytes) >= 1 << 30 else f"{nbytes / 2**20:,.2f} MiB"
