"""GraphRunner: a step function, its buffers and its graphs, called like a function."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stepgraph.runtime.audit import AddressAudit
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CapturedGraph, CaptureReport, Progress, capture_ladder
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode, Reason, cliffs
from stepgraph.runtime.errors import CaptureError, ConfigError, InputError, ReplayError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.outputs import SharedOutputs, StepOutput, named_outputs, real_rows
from stepgraph.runtime.stats import Stats

Step = Callable[..., Any]

_log = logging.getLogger(__name__)


class GraphRunner:
    """Runs a decode step through captured graphs.

    step: called as `step(**views)` with each slot's leading rows; returns a tensor, a mapping or a named tuple of
        tensors. Once captured it is not called again, except for batches that no graph covers. What it changes
        outside its buffers it must also change on the device.
    buffers: the step's inputs and its persistent state.
    config: backend and ladder.

    The step is run and recorded without gradients. Calls come from one thread at a time, and a replay runs on that
    thread's current stream: who changes the stream between calls orders the two (`new.wait_stream(old)`), since the
    graphs share a pool and their outputs. The runner keeps the step alive, but not what the step has let go of; see
    `watch`. The whole contract is in docs/design.md, "Threads and streams".

    Raises:
        ConfigError: a ladder that does not fit the buffers.
    """

    def __init__(self, step: Step, buffers: StaticBuffers, config: GraphConfig) -> None:
        ladder = config.ladder if config.backend is Backend.FULL else None
        if ladder is not None and ladder.max_size > buffers.max_requests:
            raise ConfigError(
                f"ladder: size {ladder.max_size} does not fit buffers of {buffers.max_requests} requests; "
                f"end the ladder there or allocate larger buffers"
            )
        self.buffers = buffers
        self.config = config
        self.stats = Stats()
        self._step = step
        self._ladder = ladder
        self._graphs: dict[BatchDescriptor, CapturedGraph] = {}
        self._dispatcher = Dispatcher(ladder, ())
        self._lent: dict[Decision, dict[str, torch.Tensor]] = {}
        self._batches = [BatchDescriptor.decode(max(n, 1)) for n in range(buffers.max_requests + 1)]
        self._step_count = 0
        self._told: set[Reason] = set()  # why steps have fallen back so far
        self._audit = AddressAudit()
        self._check: Callable[[], None] | None = None  # before each replay, once something is watched
        self._turn = threading.Lock()
        self._inside = 0  # the thread that holds the turn

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Record every size of the ladder. With graphs disabled there is nothing to do.

        The step really runs while it warms up, on padded rows throughout: state outside the buffers must bear that.
        The buffers are reset before and after.

        Raises:
            CaptureError: captured already, or no size could be captured.
            ReplayError: another thread is in a step.
        """
        with self._alone(), torch.no_grad():
            return self._capture(progress)

    def watch(self, module: torch.nn.Module, name: str = "") -> None:
        """Refuse replays once a parameter or buffer of `module` has left the memory that the graphs read.

        `module.weight = x`, `weight.data = x`, `load_state_dict(assign=True)` and `module.to(...)` move a tensor; a
        graph goes on reading the old memory, freed or not. Each replay looks at a few tensors in turn (at most 1 µs),
        and with `debug` at all. What counts is where they lie when the graphs are captured: call this before, or
        straight after. name: goes before the tensors' dotted names.

        Raises:
            ConfigError: another module is watched under this name.
        """
        self._audit.watch(module, name, captured=bool(self._graphs))
        self._check = self._audit.sweep if self.config.debug else self._audit.glance

    def check_addresses(self) -> None:
        """Look at every watched tensor now, rather than at a few a replay.

        Raises:
            ReplayError: names the tensors that moved since the capture, from where to where.
        """
        self._audit.sweep()

    def __call__(self, *, num_requests: int | None = None, **inputs: Any) -> StepOutput:
        """Run one step.

        inputs: per slot its real rows; a slot left out keeps what it held. num_requests is needed only where no
        request slot is given.

        Raises:
            InputError: no batch size, more requests than the buffers hold, or inputs that do not fit.
            ReplayError: a watched tensor moved, or another thread is in a step.
        """
        if not self._turn.acquire(blocking=False):  # as _alone(), which costs too much for every step
            raise self._occupied()
        try:
            self._inside = threading.get_ident()
            if num_requests is None:
                num_requests = self._infer_requests(inputs)
            if not 1 <= num_requests <= self.buffers.max_requests:
                raise InputError(f"{num_requests} requests; the buffers hold 1 to {self.buffers.max_requests}")
            decision = self._dispatcher.dispatch(self._batches[num_requests])
            if self._check is not None and decision.mode is Mode.FULL:
                self._check()
            self.buffers.stage(decision.batch, decision.key, inputs)
            tensors = self._replay(decision) if decision.mode is Mode.FULL else self._run_eager(decision)
            self.stats.record(decision)
            self._step_count += 1
            return StepOutput(tensors, decision, self._lease() if self.config.debug else None)
        finally:
            self._inside = 0
            self._turn.release()

    def coverage(self) -> list[Decision]:
        """The route of every batch from 1 to what the buffers hold, known before the first request."""
        return self._dispatcher.coverage(self.buffers.max_requests)

    def graph_nodes(self, num_requests: int) -> list[GraphNode]:
        """What the graph consists of that runs a batch of this size: every node with the region that recorded it.

        Raises:
            CaptureError: no graph runs it (says why), or the platform cannot look into its graphs.
            InputError: more requests than the buffers hold.
        """
        if not 1 <= num_requests <= self.buffers.max_requests:
            raise InputError(f"{num_requests} requests; the buffers hold 1 to {self.buffers.max_requests}")
        decision = self._dispatcher.dispatch(self._batches[num_requests])
        if decision.mode is not Mode.FULL:
            raise CaptureError(f"no graph runs a batch of {num_requests}: {decision.detail}")
        return self._graphs[decision.key].recording.nodes()

    def release(self) -> None:
        """Wait for the device, then give the graphs and their pool back; steps run eagerly until `capture()`.

        Raises:
            ReplayError: another thread is in a step.
        """
        with self._alone():
            self.buffers.platform.synchronize()
            for graph in self._graphs.values():
                graph.recording.release()
            self._graphs = {}
            self._lent = {}
            self._dispatcher = Dispatcher(self._ladder, ())
            self._audit.forget()

    def _capture(self, progress: Progress | None) -> CaptureReport:
        if self._ladder is None:
            return CaptureReport()
        if self._graphs:
            raise CaptureError("captured already; call release() first")
        outputs = SharedOutputs(self.buffers.slab)
        largest = BatchDescriptor.decode(self._ladder.max_size)

        def step(key: BatchDescriptor) -> dict[str, torch.Tensor]:
            return outputs.collect(self._step(**self.buffers.views(key)), key, largest)

        self.buffers.reset()
        try:
            report = capture_ladder(
                self.buffers.platform, self._ladder, step, warmups=self.config.warmups, progress=progress
            )
        finally:
            self.buffers.reset()
        self.buffers.platform.synchronize()  # the first call may come on any stream
        self._graphs = report.graphs
        self._dispatcher = Dispatcher(self._ladder, report.graphs, report.dropped)
        self._audit.remember()
        for cliff in cliffs(self.coverage()):
            _log.warning("%s", cliff)
        return report

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the turn. A second thread is refused, not queued: the step it prepared for is no longer the next."""
        if not self._turn.acquire(blocking=False):
            raise self._occupied()
        try:
            self._inside = threading.get_ident()
            yield
        finally:
            self._inside = 0
            self._turn.release()

    def _occupied(self) -> ReplayError:
        if self._inside == threading.get_ident():
            return ReplayError("a runner was called from inside its own step; call it after the step has returned")
        other = next((t.name for t in threading.enumerate() if t.ident == self._inside), "another thread")
        return ReplayError(
            f"two threads in one runner: {threading.current_thread().name} called it while {other} was in it; "
            f"give each thread a runner of its own, or let one wait for the other"
        )

    def _replay(self, decision: Decision) -> dict[str, torch.Tensor]:
        graph = self._graphs[decision.key]
        graph.recording.replay()
        lent = self._lent.get(decision)
        if lent is None:
            lent = self._lent[decision] = real_rows(graph.outputs, decision)
        return lent

    def _run_eager(self, decision: Decision) -> dict[str, torch.Tensor]:
        if decision.reason not in self._told and decision.reason is not Reason.DISABLED:
            self._told.add(decision.reason)
            _log.warning("a step runs eagerly (%s): %s", decision.reason, decision.detail)
        with torch.no_grad():
            return named_outputs(self._step(**self.buffers.views(decision.key)))

    def _infer_requests(self, inputs: Mapping[str, Any]) -> int:
        for name, value in inputs.items():
            slot = self.buffers.slots.get(name)
            if slot is not None and slot.per == "request":
                if not hasattr(value, "__len__") or not getattr(value, "shape", (1,)):
                    raise InputError(f"slot {name}: one value is no batch; give a row for each request")
                return len(value)
        raise InputError("no request slot among the inputs tells the batch size; pass num_requests=")

    def _lease(self) -> Callable[[], str | None]:
        made_at = self._step_count

        def expired() -> str | None:
            if self._step_count == made_at:
                return None
            return f"step {made_at} made it and step {made_at + 1} has run since"

        return expired
