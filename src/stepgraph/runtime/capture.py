"""The capture session: every key warmed up and recorded, in one pool, and no key brings the others down."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import Debug
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.memory.cost import CaptureCost, CostMeter
from stepgraph.runtime.memory.shortage import remedy
from stepgraph.runtime.naming import describe
from stepgraph.runtime.platforms import DeviceMemory, Platform, Recording
from stepgraph.runtime.pool import GraphPool
from stepgraph.runtime.progress import Progress

T = TypeVar("T")

CapturedStep = Callable[[BatchDescriptor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class CapturedGraph:
    """One recorded key, how it runs, where its outputs lie, and what it took."""

    key: BatchDescriptor
    mode: Mode
    recording: Recording
    outputs: dict[str, torch.Tensor]
    cost: CaptureCost

    @property
    def seconds(self) -> float:
        return self.cost.seconds


@dataclass(frozen=True)
class CaptureReport:
    """What a session captured, what it dropped and why, and how long it took in seconds.

    pending: what a lazy session has left for later, in the order of the ladder.
    before: the device's memory when the session began.
    """

    graphs: dict[BatchDescriptor, CapturedGraph] = field(default_factory=dict)
    dropped: dict[BatchDescriptor, str] = field(default_factory=dict)
    seconds: float = 0.0
    pending: dict[BatchDescriptor, Mode] = field(default_factory=dict)
    before: DeviceMemory | None = None

    def __or__(self, later: CaptureReport) -> CaptureReport:
        """Both sessions, of which the later one took its keys from what was pending."""
        graphs, dropped = {**self.graphs, **later.graphs}, {**self.dropped, **later.dropped}
        pending = {key: mode for key, mode in self.pending.items() if key not in graphs and key not in dropped}
        return CaptureReport(graphs, dropped, self.seconds + later.seconds, pending, self.before)


def capture_graphs(
    pool: GraphPool,
    keys: Mapping[BatchDescriptor, Mode],
    step: CapturedStep,
    *,
    warmups: int,
    debug: Debug = Debug.OFF,
    progress: Progress | None = None,
    seconds: float | None = None,
    compiled: Callable[[], float] = lambda: 0.0,
) -> CaptureReport:
    """Record `step` at each key, in the order given, so that smaller ones reuse what larger ones took from the pool.

    A key that fails is dropped with its reason and the others stay. What it took is given back: where it has left
    memory in the pool of others of this call, those are recorded once more, into a fresh one. Where the pool had graphs
    before, it stays there for later keys, and the reason says so.

    seconds: no key is begun after so many. The report may be without graphs. compiled: the seconds that compiling has
    taken so far, which are told apart from those of warm-ups.
    """
    started, before = time.perf_counter(), pool.platform.memory()
    until = float("inf") if seconds is None else started + seconds
    session = _Session(
        pool, step, warmups, debug, progress, until, compiled, pool.handle if pool.holds_graphs else None
    )
    with _collector_frozen():
        graphs, dropped, wasted = session.record(keys)
        if wasted:
            kept = {key: graph.mode for key, graph in graphs.items()}
            let_go_of_graphs(pool.platform, graphs)
            pool.renew()
            pool.platform.give_back()
            graphs, dropped_later, _ = replace(session, occupied=None).record(kept)
            dropped |= dropped_later
    if progress is not None:
        progress(len(keys), len(keys), "captured")
    pool.platform.synchronize()
    return CaptureReport(graphs, dropped, time.perf_counter() - started, before=before)


def let_go_of_graphs(platform: Platform, graphs: dict[BatchDescriptor, CapturedGraph]) -> None:
    """Release them all, once the device is done."""
    platform.synchronize()
    while graphs:
        graphs.popitem()[1].recording.release()


@dataclass(frozen=True)
class _Session:
    pool: GraphPool
    step: CapturedStep
    warmups: int
    debug: Debug
    progress: Progress | None
    until: float  # of perf_counter()
    compiled: Callable[[], float]
    occupied: Any  # the pool's handle where it had graphs before
    warm: set[tuple[int | None, Mode]] = field(default_factory=set)  # query lengths and modes that ran

    def record(
        self, keys: Mapping[BatchDescriptor, Mode]
    ) -> tuple[dict[BatchDescriptor, CapturedGraph], dict[BatchDescriptor, str], bool]:
        """The graphs, why others were dropped, and whether those have left memory behind in the graphs' pool."""
        graphs: dict[BatchDescriptor, CapturedGraph] = {}
        dropped: dict[BatchDescriptor, str] = {}
        wasted = False
        platform = self.pool.platform
        for done, (key, mode) in enumerate(keys.items()):
            if done and time.perf_counter() >= self.until:
                break
            if self.progress is not None:
                self.progress(done, len(keys), describe(key))
            meter = CostMeter(self.pool, self.compiled)
            try:
                graphs[key] = self._one(key, mode, meter)
            except torch.OutOfMemoryError as error:
                _let_go(error)  # of the tensors that the step had made
                stays = 0
                if not self.pool.holds_graphs:
                    self.pool.renew()
                elif self.pool.handle == self.occupied:
                    stays = meter.pool_growth()
                else:
                    wasted |= meter.pool_growth() > 0
                platform.give_back()
                dropped[key] = remedy(error, key, keys, platform.memory(), stays)
            except CaptureError as error:
                _let_go(error)
                self.pool.renew()
                dropped[key] = str(error)
            except BaseException:
                let_go_of_graphs(platform, graphs)
                self.pool.renew()
                raise
        return graphs, dropped, wasted

    def _one(self, key: BatchDescriptor, mode: Mode, meter: CostMeter) -> CapturedGraph:
        step, platform = partial(self.step, key), self.pool.platform
        warmups = self.warmups or int((key.query_len, mode) not in self.warm)
        self.warm.add((key.query_len, mode))
        for _ in range(warmups):
            platform.warm_up(step)
        meter.warmed_up()
        try:
            recording, outputs = _record(self.pool, mode, self.debug, step)
        except CaptureError as error:
            if warmups:
                raise
            _let_go(error)
            self.pool.renew()
            platform.warm_up(step)
            meter.warmed_up()
            recording, outputs = _record(self.pool, mode, self.debug, step)
        self.pool.holds_graphs = True
        return CapturedGraph(key, mode, recording, outputs, meter.cost(recording))


def _record(pool: GraphPool, mode: Mode, debug: Debug, step: Callable[[], T]) -> tuple[Recording, T]:
    platform, handle = pool.platform, pool.handle
    if debug is Debug.EAGER_THROUGH_GRAPH:
        return platform.record_eager(step)
    if debug is Debug.BREAK_EVERY_OP:
        return platform.record_breakable(step, handle, every_op=True)
    return platform.record(step, handle) if mode is Mode.FULL else platform.record_breakable(step, handle)


def _let_go(error: BaseException | None) -> None:
    """Of everything that the frames of an error hold; what it says stays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """No garbage collection while recording: it is slow there, and could free a graph in the middle of a capture.

    Frozen, what is there already is also left alone by code that collects on its own account.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()
