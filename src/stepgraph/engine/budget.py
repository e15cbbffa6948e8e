"""Who takes how much of the device's memory, by the device's own figure: what is shown adds up to all it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.base import DeviceMemory

FRACTION = 0.9
"""Of the device's memory, that this process and all others there may take together."""
MARGIN = 256 << 20
"""Bytes that stay free within it, for what the allocator loses to fragmentation and what libraries load late."""


class Device(Protocol):
    """What a platform says of its device."""

    device: torch.device

    def memory(self) -> DeviceMemory | None:
        """Its memory now."""

    def give_back(self) -> None:
        """Return what nothing uses any more to the device."""


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
        rows = [{"name": row.name, "bytes": row.nbytes} for row in self.rows]
        return {"rows": rows, "total_bytes": self.total, "fraction": self.fraction}


class Budget:
    """A device's memory as it is taken, one row after another.

    fraction: of all there is, that this and every other process there may take.

    Raises:
        ConfigError: a fraction that is none.
    """

    def __init__(self, device: Device, fraction: float = FRACTION) -> None:
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {fraction}; it is a share of the device's memory, above 0, at most 1"
            )
        self._device, self.fraction = device, fraction
        self.name, self.total = str(device.device), self._memory().total
        self._rows: list[MemoryRow] = []
        self._held: list[MemoryRow] = []
        self._free = self.total
        self.take("driver, torch, other processes")

    @property
    def allowed(self) -> int:
        """Bytes of the fraction."""
        return int(self.total * self.fraction)

    @property
    def taken(self) -> int:
        """Bytes of all rows so far."""
        return self.total - self._free

    @property
    def spare(self) -> int:
        """Bytes of the fraction that nobody has or is to have, less the margin. Negative where there are too few."""
        return self.allowed - self.taken - self._held_bytes - MARGIN

    def take(self, name: str, *, with_cached: bool = False) -> None:
        """Add a row: what is free now less than at the last one.

        with_cached: what torch holds and nobody uses counts as taken. By default it is given back first.
        """
        if not with_cached:
            self._device.give_back()
        free = self._memory().free
        self._rows.append(MemoryRow(name, self._free - free))
        self._free = free

    def hold(self, name: str, nbytes: int) -> None:
        """Keep bytes free for what will be taken later."""
        self._held.append(MemoryRow(name, nbytes))

    def table(self) -> MemoryTable:
        """The rows, and what is left: what is held free, the margin, what is beyond the fraction, and the rest."""
        outside = self.total - self.allowed
        left = (
            MemoryRow("margin", MARGIN),
            MemoryRow("beyond memory_fraction", outside),
            MemoryRow("unused", self._free - self._held_bytes - MARGIN - outside),
        )
        return MemoryTable((*self._rows, *self._held, *left), self.total, self.fraction)

    @property
    def _held_bytes(self) -> int:
        return sum(row.nbytes for row in self._held)

    def _memory(self) -> DeviceMemory:
        memory = self._device.memory()
        if memory is None:
            raise ConfigError(f"{self._device.device} has no memory of its own to share out")
        return memory
