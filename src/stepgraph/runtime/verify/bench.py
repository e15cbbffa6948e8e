"""One batch at one key, run in every way from the same memory: eager, padded, replayed, and observed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.graphs import Graphs
from stepgraph.runtime.outputs import named_outputs, real_rows
from stepgraph.runtime.platforms import Platform, Recording
from stepgraph.runtime.slots import PaddingPolicy, Slot
from stepgraph.runtime.verify.observe import Observer, Operation, observe_eager, observe_replay

Results = dict[str, torch.Tensor]
"""What a run left, by what it is: outputs, device-owned slots and the state, as they lie there until the next run."""


@dataclass(frozen=True)
class Subject:
    """What is verified.

    run: the step on the rows of a batch or key. state: what it changes outside the buffers. check_addresses: raises if
    something that is watched has moved.
    """

    run: Callable[[BatchDescriptor], Any]
    graphs: Graphs
    buffers: StaticBuffers
    platform: Platform
    request_slots: int | None
    state: Mapping[str, torch.Tensor]
    check_addresses: Callable[[], None]


class Bench:
    """A batch, the key that runs it, and its inputs. Every run starts from the same state and random seed.

    turn: which of the worst values the first padded row gets; there may be but one.
    poisoned: the slots whose padded rows may hold anything, so that they are filled with the worst.
    """

    def __init__(
        self,
        subject: Subject,
        saved: Results,
        batch: BatchDescriptor,
        key: BatchDescriptor,
        inputs: Mapping[str, Any],
        seed: int,
        turn: int = 0,
    ) -> None:
        self.subject, self.batch, self.key = subject, batch, key
        self._saved, self._inputs, self._seed, self._turn = saved, inputs, seed, turn
        buffers = subject.buffers
        self._heads, self._ends = buffers.rows(batch), buffers.rows(key, subject.request_slots)
        self.poisoned = [
            slot.name
            for slot in buffers.slots.values()
            if slot.tail_value is None and self._heads[slot.per] < self._ends[slot.per]
        ]

    def live(self) -> Results:
        """Eager, on the batch's own rows."""
        self._prepare(self.batch, ())
        return self._left(named_outputs(self.subject.run(self.batch)))

    def padded(self, poisoned: Sequence[str] | None = None, seed: int = 0) -> Results:
        """Eager, on the key's rows. seed: for other random numbers."""
        self._prepare(self.key, self.poisoned if poisoned is None else poisoned, seed)
        return self._left(self._real(named_outputs(self.subject.run(self.key))))

    def replayed(self, seed: int = 0) -> Results:
        self._prepare(self.key, self.poisoned, seed)
        graph = self.subject.graphs.by_key[self.key]
        graph.recording.replay()
        return self._left(self._real(graph.outputs))

    def replayed_fresh(self, recording: Recording, outputs: Mapping[str, torch.Tensor]) -> Results:
        """Another recording of the key."""
        self._prepare(self.key, self.poisoned)
        recording.replay()
        return self._left(self._real(outputs))

    def recorded_op_by_op(self) -> tuple[Recording, dict[str, torch.Tensor]]:
        """A fresh recording of the key in which every operator can be looked at. It is made on empty buffers, as the
        first one was, so that a value it takes for good is the wrong one here too."""
        self._restore()
        platform = self.subject.platform
        recording, result = platform.record_breakable(
            lambda: self.subject.run(self.key), platform.new_pool(), every_op=True
        )
        return recording, named_outputs(result)

    def observe_live(self, *, detail_at: int | None = None) -> list[Operation]:
        self._prepare(self.batch, ())
        return observe_eager(lambda: self.subject.run(self.batch), self._observer(True, detail_at))

    def observe_padded(
        self, *, keep: bool, detail_at: int | None = None, tails: bool = False, seed: int = 0
    ) -> list[Operation]:
        self._prepare(self.key, self.poisoned, seed)
        return observe_eager(lambda: self.subject.run(self.key), self._observer(keep, detail_at, tails))

    def observe_replayed(self, recording: Recording, *, keep: bool, detail_at: int | None = None) -> list[Operation]:
        self._prepare(self.key, self.poisoned)
        return observe_replay(recording, self._observer(keep, detail_at))

    def _observer(self, keep: bool, detail_at: int | None, tails: bool = False) -> Observer:
        return Observer(self._lens, keep=keep, detail_at=detail_at, tails=tails)

    def _prepare(self, rows_of: BatchDescriptor, poisoned: Sequence[str], seed: int = 0) -> None:
        self._restore()
        buffers = self.subject.buffers
        buffers.stage(self.batch, rows_of, self._inputs, self.subject.request_slots)
        for name in poisoned:
            slot = buffers.slots[name]
            rows = buffers[name]
            real, end = self._heads[slot.per], self._ends[slot.per]
            worst = _worst(slot, rows[:real])
            for start in range(len(worst)):
                rows[real + start : end : len(worst)] = worst[(self._turn + start) % len(worst)]
        seed_everything(self._seed + seed)

    def _restore(self) -> None:
        """The state as it was, and empty buffers."""
        for name, tensor in self.subject.state.items():
            tensor.copy_(self._saved[name])
        self.subject.buffers.reset()

    def _left(self, outputs: Mapping[str, torch.Tensor]) -> Results:
        buffers = self.subject.buffers
        left = {f"output {name}": value for name, value in outputs.items()}
        for name, slot in buffers.slots.items():
            if slot.owner == "device":
                left[f"slot {name}"] = buffers[name][: self._heads[slot.per]]
        return left | {f"state {name}": tensor for name, tensor in self.subject.state.items()}

    def _real(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return real_rows(outputs, self.subject.graphs.units, self.batch)

    def _lens(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The real rows of a tensor with a row for each token or request; of the state, what of it counts."""
        storage = tensor.untyped_storage()._cdata
        inside = [part for part in self.subject.state.values() if part.untyped_storage()._cdata == storage]
        if inside:
            return inside
        real = [
            self._heads[unit] for unit in ("token", "request") if tensor.dim() and tensor.shape[0] == self._ends[unit]
        ]
        return [tensor[: min(real)] if real else tensor]


def _worst(slot: Slot, real: torch.Tensor) -> list[float]:
    """What does the most harm, in turn, where a step uses a row that it should not: NaN, or an index of a real row, and
    one that no row of the batch has. Which of two writes to a real row's place is the last, a GPU leaves open."""
    if slot.dtype.is_floating_point:
        return [float("nan") if slot.pad is not PaddingPolicy.FILL_ONCE else float(real.float().max())]
    taken = set(real.unique().tolist())
    largest = max(taken)
    free = next((index for index in range(int(largest) - 1, 0, -1) if index not in taken), None)
    return [largest] if free is None or slot.dtype is torch.bool else [largest, free]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """The process's generators as they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
