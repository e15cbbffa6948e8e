"""What the recordings of a tape hold, counted."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class TapePool:
    """The storages that recordings made. Each holds its own, so nothing is shared: the pool only counts."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # the reference keeps a storage's id from reuse

    def add(self, storage: torch.UntypedStorage) -> None:
        """A recording holds this storage."""
        self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def nbytes(self) -> int:
        """Of those that are still held."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())
