"""Persistent step buffers: frozen addresses, written in place, padded by a policy that each slot must name.

One device allocation (the slab) holds all slots. Slots that the host owns come first and are brought over in one
copy; slots that the device owns lie behind them and are never copied over, since a step advances them itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.device_rows import DeviceRows
from stepgraph.runtime.entries import EntryRing
from stepgraph.runtime.errors import ConfigError, InputError
from stepgraph.runtime.layout import Span, joined, pack
from stepgraph.runtime.platforms import Platform, platform_for
from stepgraph.runtime.slots import NUMPY_KNOWS, PaddingPolicy, Rows, Slot

__all__ = ["PaddingPolicy", "Slot", "StaticBuffers"]

_NO_ROWS: Rows = {"token": 0, "request": 0}


class StaticBuffers(DeviceRows):
    """The slots of a step, allocated once at the largest shape.

    max_requests, max_tokens: rows of request and token slots (tokens default to requests).
    device: where the step runs; decides the platform.

    staged: the live batch and the key of the last staging, another pair each time that one writes; None after a reset.

    Raises:
        ConfigError: no slots, repeated names, or sizes that are no integers or below 1.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        slots: Iterable[Slot],
        device: torch.device | str = "cpu",
        max_tokens: int | None = None,
    ) -> None:
        given = list(slots)
        self.slots = {slot.name: slot for slot in given}
        if not given or len(self.slots) != len(given):
            raise ConfigError("buffers: give at least one slot, and each a name of its own")
        try:
            self.max_requests = operator.index(max_requests)
            self.max_tokens = self.max_requests if max_tokens is None else operator.index(max_tokens)
        except TypeError:
            raise ConfigError(f"buffers: {max_requests!r} requests, {max_tokens!r} tokens; both are integers") from None
        if self.max_tokens < self.max_requests:
            raise ConfigError(f"buffers: {self.max_tokens} tokens are fewer than {self.max_requests} requests")
        if self.max_requests < 1 or self.max_tokens < 1:
            raise ConfigError(f"buffers: {self.max_requests} requests, {self.max_tokens} tokens; both start at 1")
        self._capacity: Rows = {"request": self.max_requests, "token": self.max_tokens}
        self.platform: Platform = platform_for(device)
        self.device = self.platform.device

        ordered = sorted(given, key=lambda slot: slot.owner == "device")
        self._spans, end = pack(ordered, self._capacity)
        host_end = max((self._spans[s.name][1] for s in ordered if s.owner == "host"), default=0)

        with torch.inference_mode(False):  # inference tensors could not be written outside that mode
            self.slab = torch.zeros(end, dtype=torch.uint8, device=self.device)
            self._host = torch.zeros(host_end, dtype=torch.uint8)
            self._on_device = {slot.name: self._typed(self.slab, slot) for slot in ordered}
            self._on_host = {slot.name: self._typed(self._host, slot) for slot in ordered if slot.owner == "host"}
        self._mirror = self.platform.host_mirror(self._host, self.slab[:host_end])
        self._arrays = {name: tensor.numpy() for name, tensor in self._on_host.items() if tensor.dtype in NUMPY_KNOWS}
        self._views: dict[tuple[BatchDescriptor, int | None], dict[str, torch.Tensor]] = {}
        self._fed_from_device: set[str] = set()
        self.staged: tuple[BatchDescriptor, BatchDescriptor] | None = None
        self._heads_staged = _NO_ROWS
        self._ranges = [(0, host_end)] if host_end else []
        self._patched: dict[str, set[int]] = {slot.name: set() for slot in given if slot.owner == "device"}
        self._entries: dict[str, EntryRing] = {}
        self.times_reset = 0
        self.reset()
        self._required = [s.name for s in given if s.pad is PaddingPolicy.FOREACH_COPY]
        self._resets = [(s, s.tail_value) for s in given if s.tail_value is not None]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole slot, [rows, *shape], on the device."""
        return self._on_device[name]

    def reset(self) -> None:
        """Every slot as it was allocated: all rows hold the slot's pad value (0 unless given)."""
        for name, slot in self.slots.items():
            self._on_device[name].fill_(slot.pad_value)
            if name in self._on_host:
                self._on_host[name].fill_(slot.pad_value)
        self.staged, self._heads_staged = None, _NO_ROWS
        self.times_reset += 1

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens inside, all slots and what staging knows of them are afterwards as they were before."""
        try:
            slab = self.slab.clone()
        except torch.OutOfMemoryError:
            slab = self.slab.cpu()
        host = self._host.clone()
        known = (self.staged, self._heads_staged, set(self._fed_from_device), list(self._ranges), self.times_reset)
        patched = {name: set(rows) for name, rows in self._patched.items()}
        try:
            yield
        finally:
            self.slab.copy_(slab)
            self._host.copy_(host)
            self.staged, self._heads_staged, self._fed_from_device, self._ranges, self.times_reset = known
            self._patched = patched

    def views(self, batch: BatchDescriptor, request_slots: int | None = None) -> dict[str, torch.Tensor]:
        """Each slot's leading rows for a batch or key: what the step receives as keywords.

        request_slots: the most request rows of a relaxed key, which has one for each token; by default `max_requests`.
        """
        known = self._views.get((batch, request_slots))
        if known is None:
            rows = self.rows(batch, request_slots)
            known = {
                name: self._on_device[name][: rows[slot.per]]
                for name, slot in self.slots.items()
                if not (slot.mixed_only and batch.is_uniform)
            }
            if batch.is_uniform:  # of mixed batches there are too many
                self._views[batch, request_slots] = known
        return known

    def rows(self, batch: BatchDescriptor, request_slots: int | None = None) -> Rows:
        """How many rows token slots and request slots have at a batch or key; request_slots: as for `views`."""
        requests = batch.num_reqs
        if requests is None:
            requests = min(batch.num_tokens, self.max_requests, request_slots or self.max_requests)
        return {"token": batch.num_tokens, "request": requests}

    def stage(
        self,
        real: BatchDescriptor,
        padded: BatchDescriptor,
        inputs: Mapping[str, Any],
        request_slots: int | None = None,
    ) -> None:
        """Write one step's inputs into the slots and reset the tails; at most one copy from the host.

        real: the live batch. padded: the key that runs it, or the batch itself; request_slots: as for `views`.
        inputs: for each slot its real rows, as a tensor (host or device), an array or a list. A slot left out
        keeps what it held; FOREACH_COPY slots may not be left out. With nothing given and the same sizes as
        before nothing is done.

        Raises:
            InputError: an unknown or missing slot, a wrong number of rows, a dtype that would lose its kind.
        """
        for name in self._required:
            if name not in inputs:
                raise InputError(f"slot {name}: FOREACH_COPY needs it with every step, and it was not given")
        if not inputs and self.staged == (real, padded):
            return
        heads, ends = self.rows(real), self.rows(padded, request_slots)
        # All inputs are checked before the first is written: a refused step leaves the buffers as they were.
        from_host: list[tuple[Slot, Any]] = []
        from_device: list[tuple[Slot, torch.Tensor]] = []
        for name, value in inputs.items():
            slot = self.slots.get(name)
            if slot is None:
                raise InputError(f"slot {name}: no such slot; known are {', '.join(self.slots)}")
            source = slot.checked(heads[slot.per], value)
            if slot.owner == "device" or (isinstance(source, torch.Tensor) and source.device.type != "cpu"):
                from_device.append((slot, torch.as_tensor(source)))
            else:
                from_host.append((slot, source))
        for slot, source in from_host:
            self._write_host(slot, source)
        fed = {slot.name for slot, _ in from_device}
        self._reset_tails(heads, ends, fed)
        self._upload(fed)
        for slot, source in from_device:
            self._on_device[slot.name][: source.shape[0]].copy_(source, non_blocking=True)
        self.staged, self._heads_staged = (real, padded), heads

    def _typed(self, storage: torch.Tensor, slot: Slot) -> torch.Tensor:
        start, stop = self._spans[slot.name]
        return storage[start:stop].view(slot.dtype).view(self._capacity[slot.per], *slot.shape)

    def _write_host(self, slot: Slot, source: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(source, torch.Tensor):
            self._on_host[slot.name][: source.shape[0]] = source
        else:  # numpy writes a few small rows several times faster than torch does
            self._arrays[slot.name][: source.shape[0]] = source
        if slot.name in self._fed_from_device:
            self._fed_from_device.discard(slot.name)
            self._ranges = self._host_ranges()

    def _reset_tails(self, heads: Rows, ends: Rows, fed: set[str]) -> None:
        for slot, value in self._resets:
            rows, stop = heads[slot.per], ends[slot.per]
            if slot.owner == "device":
                if slot.name not in fed:
                    self._reset_moved_rows(slot, rows, value)
                    continue
                stop = max(stop, self._heads_staged[slot.per])
            if rows < stop:
                if slot.name in fed or slot.name in self._fed_from_device:
                    self._on_device[slot.name][rows:stop] = value
                else:
                    self._arrays.get(slot.name, self._on_host[slot.name])[rows:stop] = value
        for patched in self._patched.values():
            patched.clear()

    def _reset_moved_rows(self, slot: Slot, rows: int, value: float) -> None:
        """The step advances this slot itself: only rows that were given up, or join without a patch, are reset."""
        before, patched = self._heads_staged[slot.per], self._patched[slot.name]
        if rows < before:
            self._on_device[slot.name][rows:before] = value
        for row in range(before, rows):
            if row not in patched:
                self._on_device[slot.name][row] = value
        for row in patched:
            if row >= max(rows, before):  # patched, but no request came to stand there
                self._on_device[slot.name][row] = value

    def _upload(self, fed: set[str]) -> None:
        newly_fed = {name for name in fed if name in self._on_host} - self._fed_from_device
        if newly_fed:
            self._fed_from_device |= newly_fed
            self._ranges = self._host_ranges()
        if self._ranges:
            self._mirror.upload(self._ranges)

    def _host_ranges(self) -> list[Span]:
        """Of the packed copy: one, unless a slot is at present fed from the device."""
        return joined(
            span for name, span in self._spans.items() if name in self._on_host and name not in self._fed_from_device
        )
