"""Single entries of a tensor, written where the device reads what to write in memory that both share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stepgraph.runtime.platforms import Platform

_LEAST = 256  # entries that there is room for from the beginning
Array = np.ndarray[Any, Any]


class EntryRing:
    """Two lists of entries in turn: one may be rewritten while the device still reads the other.

    target: on the device, of whole numbers, contiguous.
    """

    def __init__(self, platform: Platform, target: torch.Tensor) -> None:
        self._platform, self._target = platform, target.view(-1)
        self._most, self._turn, self._ring = _LEAST, 0, self._made(_LEAST)

    def put(self, places: Array, values: Array) -> None:
        """Write `values` to these places of the target, counted through all its dimensions, in the order of the current
        stream: one launch and no copy. Waits for the write before the last; where more are put than ever before, for
        both."""
        if len(places) > self._most:
            for entries in self._ring:
                entries.read.wait()
            self._ring, self._most = self._made(2 * len(places)), 2 * len(places)
        entries = self._ring[self._turn]
        self._turn = 1 - self._turn
        self._target.index_copy_(0, *entries.fill(places, values))  # `put_` is refused in torch's deterministic mode
        entries.read.set()

    def _made(self, most: int) -> list[_Entries]:
        return [_Entries(self._platform, most, self._target.dtype) for _ in range(2)]


class _Entries:
    """Up to `most` places and values. read: where the device has read them, to be set."""

    def __init__(self, platform: Platform, most: int, dtype: torch.dtype) -> None:
        self.read = platform.mark()
        self._on_device, hosts = zip(*(platform.shared((most,), kind) for kind in (torch.int64, dtype)), strict=True)
        self._places, self._values = (host.numpy() for host in hosts)
        self._views = self._on_device  # as many as were filled last: the next are as many, mostly

    def fill(self, places: Array, values: Array) -> tuple[torch.Tensor, ...]:
        """Returns them as the device sees them, once it has read those before."""
        self.read.wait()
        count = len(places)
        self._places[:count], self._values[:count] = places, values
        if len(self._views[0]) != count:
            self._views = tuple(whole[:count] for whole in self._on_device)
        return self._views
