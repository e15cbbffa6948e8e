"""Replay against eager, for every captured key, on the worst inputs that the padding allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.errors import CaptureError, InputError
from stepgraph.runtime.naming import describe
from stepgraph.runtime.progress import Progress
from stepgraph.runtime.slots import Slot
from stepgraph.runtime.verify.bench import Bench, Results, Subject, random_state_kept
from stepgraph.runtime.verify.compare import Tolerance, far_apart
from stepgraph.runtime.verify.localise import (
    where_inside_parts,
    where_padding_parts,
    where_random_parts,
    where_recording_parts,
)
from stepgraph.runtime.verify.observe import digest
from stepgraph.runtime.verify.report import Fault, FaultKind, KeyReport, VerifyReport

MakeInputs = Callable[[BatchDescriptor, torch.Generator], dict[str, Any]]
"""Inputs of a batch, drawn from a CPU generator: for every slot, device-owned ones too, its real rows."""

Nearest = Callable[[BatchDescriptor, int], BatchDescriptor]
"""Of a batch and the request slots of its key, the nearest batch of that key that there may be."""

_OTHER_SEED = 1


def verify(
    subject: Subject,
    make_inputs: MakeInputs | None,
    nearest: Nearest | None,
    seed: int,
    batches_per_key: int,
    tolerance: Tolerance,
    progress: Progress | None = None,
) -> VerifyReport:
    """What GraphRunner.verify does.

    Raises:
        CaptureError: nothing is captured.
        InputError: no batches, or inputs that do not fit them.
    """
    if batches_per_key < 1:
        raise InputError(f"{batches_per_key} batches for each key; at least one is needed")
    if not subject.graphs:
        raise CaptureError("nothing to verify: no graph is captured; call capture() first")
    verifier = _Verifier(subject, make_inputs, nearest, seed, tolerance)
    with subject.buffers.kept(), random_state_kept(subject.buffers.device):
        try:
            return verifier.run(batches_per_key, progress)
        finally:
            verifier.restore()


class _Verifier:
    def __init__(
        self,
        subject: Subject,
        make_inputs: MakeInputs | None,
        nearest: Nearest | None,
        seed: int,
        tolerance: Tolerance,
    ) -> None:
        self._subject, self._nearest = subject, nearest
        self._make_inputs = make_inputs or self._draw
        self._seed, self._tolerance = seed, tolerance
        self._saved = {name: tensor.clone() for name, tensor in subject.state.items()}
        self._rng = random.Random(seed)

    def run(self, batches_per_key: int, progress: Progress | None) -> VerifyReport:
        reports = {key: KeyReport(key, graph.mode) for key, graph in self._subject.graphs.by_key.items()}
        later: list[tuple[KeyReport, Bench, dict[str, torch.Tensor]]] = []
        for done, (key, report) in enumerate(reports.items()):
            if progress is not None:
                progress(done, len(reports), describe(key))
            benches = [self._bench(key, *each) for each in enumerate(self._batches(key, batches_per_key))]
            if fault := self._random(benches[0]):
                report.faults.append(fault)  # what else differs follows from it
                continue
            for bench in benches:
                report.batches += 1
                report.faults += [fault for fault in (self._recording(bench), self._padding(bench)) if fault]
                if report.faults:
                    break
            if not report.faults and (fault := self._inside(benches[-1])):
                report.faults.append(fault)
            if not report.faults:
                digests = {name: digest(value) for name, value in benches[-1].replayed().items()}
                later.append((report, benches[-1], digests))
        if progress is not None:
            progress(len(reports), len(reports), "all once more")
        for report, bench, digests in later:
            again = bench.replayed()
            changed = [name for name, value in again.items() if bool(digest(value) != digests[name])]
            if changed and (fault := self._later(bench, changed)):
                report.faults.append(fault)
        return VerifyReport(list(reports.values()))

    def restore(self) -> None:
        for name, tensor in self._subject.state.items():
            tensor.copy_(self._saved[name])

    def _recording(self, bench: Bench) -> Fault | None:
        """Same rows, same memory: eager and replay."""
        eager = _kept(bench.padded())
        what = self._differences(bench.replayed(), eager)
        if not what:
            return None
        where = where_recording_parts(bench, self._tolerance, self._differences)
        return Fault(FaultKind.RECORDING, bench.batch, tuple(what), where)

    def _inside(self, bench: Bench) -> Fault | None:
        """Where outputs are whole numbers, much can go wrong before one of them changes."""
        where = where_inside_parts(bench, self._tolerance)
        what = (
            "what it returns and leaves is the same for this batch, but not what it computes on the way; "
            "tensors that the step itself advances belong into `state`",
        )
        return Fault(FaultKind.RECORDING, bench.batch, what, where) if where else None

    def _later(self, bench: Bench, changed: list[str]) -> Fault | None:
        """A replay left other bits than before the other keys ran: is it wrong now?"""
        wrong = self._recording(bench)
        if wrong is not None:
            return Fault(FaultKind.LATER, bench.batch, wrong.what, wrong.where)
        if not self._tolerance.exact:
            return None
        return Fault(FaultKind.LATER, bench.batch, tuple(changed), ("it agrees with eager when it is replayed again",))

    def _padding(self, bench: Bench) -> Fault | None:
        """Eager twice: what do padded rows do to real ones?"""
        live = _kept(bench.live())
        what = _changed_by_padding(bench.padded(), live)
        if not what:
            return None
        where = where_padding_parts(bench)
        floats_differ = any(far_apart(value, live[name]) for name, value in bench.padded().items())
        if where is None and not floats_differ:
            return None  # a close call that another kernel's rounding decides otherwise
        guilty = [name for name in bench.poisoned if _changed_by_padding(bench.padded([name]), live)]
        by = tuple(
            f"by the padded rows of slot {name} ({bench.subject.buffers.slots[name].pad.name})" for name in guilty
        )
        return Fault(FaultKind.PADDING, bench.batch, (*what, *by), where or ())

    def _random(self, bench: Bench) -> Fault | None:
        """Do draws that differ in eager differ in a replay?"""
        eager = _kept(bench.padded())
        repeats = not self._differences(bench.padded(), eager)
        what = self._differences(bench.padded(seed=_OTHER_SEED if repeats else 0), eager)
        if repeats and not what:
            return None
        other = _OTHER_SEED if repeats else 0
        replayed = _kept(bench.replayed())
        advances = bool(self._differences(bench.replayed(seed=other), replayed))
        if repeats and advances:
            return None
        kind = FaultKind.UNREPEATABLE if advances else FaultKind.RANDOM
        return Fault(kind, bench.batch, tuple(what), where_random_parts(bench, (0, other)))

    def _differences(self, ours: Results, theirs: Results) -> list[str]:
        """What differs, in words."""
        found: list[str] = []
        for name, value in ours.items():
            reference = theirs[name]
            if value.shape != reference.shape or value.dtype != reference.dtype:
                found.append(f"{name}: {tuple(value.shape)} {value.dtype}, not {tuple(reference.shape)}")
                continue
            wrong = self._tolerance.differing(value, reference)
            if bool(wrong.any()):
                found.append(_how_much(name, value, reference, wrong))
        return found

    def _bench(self, key: BatchDescriptor, turn: int, batch: BatchDescriptor) -> Bench:
        seed = self._rng.randrange(2**31)
        inputs = self._make_inputs(batch, torch.Generator().manual_seed(seed))
        if not isinstance(inputs, Mapping):
            raise InputError(f"make_inputs returned {type(inputs).__name__}; it gives each slot's rows by name")
        return Bench(self._subject, self._saved, batch, key, inputs, seed, turn // 2)

    def _batches(self, key: BatchDescriptor, count: int) -> list[BatchDescriptor]:
        """Live batches that fit a key: a padded one, one that fills it, another padded one, then any."""
        rows = self._subject.buffers.rows(key, self._subject.request_slots)
        size = key.num_tokens if key.num_reqs is None else key.num_reqs
        padded = [self._rng.randint(1, max(size - 1, 1)) for _ in range(2)]
        sizes = [padded[0], size, padded[1], *(self._rng.randint(1, size) for _ in range(count - 3))]
        return [self._batch(key, n, rows["request"]) for n in sizes[:count]]

    def _batch(self, key: BatchDescriptor, size: int, slots: int) -> BatchDescriptor:
        if key.query_len is not None:
            batch = BatchDescriptor.decode(size, key.query_len, key.num_loras)
        else:
            batch = BatchDescriptor.mixed(size, self._rng.randint(1, min(size, slots)), key.num_loras)
        return batch if self._nearest is None else self._nearest(batch, slots)

    def _draw(self, batch: BatchDescriptor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rows = self._subject.buffers.rows(batch)
        return {name: _draw(slot, rows[slot.per], generator) for name, slot in self._subject.buffers.slots.items()}


def _draw(slot: Slot, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Floats at random; zeros for the rest, since nobody says what else is a valid index."""
    shape = (rows, *slot.shape)
    if slot.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(slot.dtype)
    return torch.zeros(shape, dtype=slot.dtype)


def _kept(results: Results) -> Results:
    return {name: value.clone() for name, value in results.items()}


def _changed_by_padding(padded: Results, live: Results) -> list[str]:
    """What differs at all and, of numbers with a fraction, by more than another kernel may round."""
    found: list[str] = []
    for name, value in padded.items():
        wrong = Tolerance().differing(value, live[name])
        if bool(wrong.any()) and (not value.is_floating_point() or far_apart(value, live[name])):
            found.append(_how_much(name, value, live[name], wrong))
    return found


def _how_much(name: str, value: torch.Tensor, reference: torch.Tensor, wrong: torch.Tensor) -> str:
    first = tuple(int(i) for i in wrong.nonzero()[0])
    one, other = value[first].item(), reference[first].item()
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {list(first)}: {one}, not {other}"
