"""Single rows of what the device owns: written, moved and filled in between two steps, in the order of its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.runtime.entries import EntryRing
from stepgraph.runtime.errors import InputError
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.slots import Rows, Slot, check_patch

Numbers = Sequence[int] | np.ndarray[Any, Any]


class DeviceRows:
    """The part of step buffers that is about rows of device-owned slots. The host never waits for the device here,
    but in `put` for what was put the time before the last.

    _patched: by slot, the rows that were written since the last staging. _entries: of the slots that have had any put.
    """

    slots: dict[str, Slot]
    max_requests: int
    device: torch.device
    platform: Platform
    _capacity: Rows
    _on_device: dict[str, torch.Tensor]
    _patched: dict[str, set[int]]
    _entries: dict[str, EntryRing]

    def patch(self, rows: Sequence[int], **values: Any) -> None:
        """Set some rows of device-owned slots: how a request joins or moves. values: [len(rows), *shape] each.

        A row that joins without a patch starts at its slot's tail value.

        Raises:
            InputError: a slot that the host owns, values of another shape or kind, or a row that is none.
        """
        rows, checked = check_patch(self.slots, self._capacity, rows, values)
        sources = {name: self._uploaded(value.to(self.slots[name].dtype)) for name, value in checked.items()}
        index = self._uploaded(torch.as_tensor(rows, dtype=torch.int64))
        for name, source in sources.items():
            self._on_device[name].index_copy_(0, index, source)
            self._patched[name].update(rows)

    def put(self, name: str, rows: Numbers, columns: Numbers, values: Numbers) -> None:
        """Set single entries of a two-dimensional device-owned slot of whole numbers, such as a block table.

        Raises:
            InputError: as `patch`, a column that is none, or not as many of each.
        """
        slot = self.slots.get(name)
        if slot is None or slot.owner != "device" or len(slot.shape) != 1 or slot.dtype.is_floating_point:
            raise InputError(f"slot {name}: no slot with owner='device' and a row of whole numbers")
        shape = (self._capacity[slot.per], *slot.shape)
        try:
            row, column, value = np.array([rows, columns, values], dtype=np.int64)
            places = np.ravel_multi_index((row, column), shape)
        except ValueError:
            raise InputError(
                f"slot {name}: rows {rows}, columns {columns} are not all within {shape}, or not as many as values"
            ) from None
        if name not in self._entries:
            self._entries[name] = EntryRing(self.platform, self._on_device[name])
        self._entries[name].put(places, value)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows of every device-owned request slot as others were: how a request moves with what only the device knows.

        Raises:
            InputError: a row that is none, or not as many of both.
        """
        if len(sources) != len(targets) or any(not 0 <= r < self.max_requests for r in (*sources, *targets)):
            raise InputError(f"rows {sources} to {targets}: the buffers hold rows 0 to {self.max_requests - 1}")
        source, target = self._uploaded(torch.tensor([sources, targets], dtype=torch.int64)).unbind()
        for name, patched in self._patched.items():
            if self.slots[name].per == "request":
                self._on_device[name].index_copy_(0, target, self._on_device[name].index_select(0, source))
                patched.update(targets)

    def _uploaded(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, without waiting for what it does now."""
        return self.platform.upload(values) if values.device.type == "cpu" else values.to(self.device)
