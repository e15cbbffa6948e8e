"""The graphs of a runner: captured, asked about, released."""

from __future__ import annotations

import logging
import math

import torch

from stepgraph.runtime.audit import AddressAudit
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.batch_step import BatchStep
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CapturedGraph, CaptureReport
from stepgraph.runtime.capture_guard import refuse_capture_while_serving
from stepgraph.runtime.compiler.steps import CompiledSteps, CompileTotal
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.dispatch import Decision
from stepgraph.runtime.errors import CaptureError, InputError
from stepgraph.runtime.graphs import BreakTotal, Graphs
from stepgraph.runtime.live_batches import LiveBatches
from stepgraph.runtime.naming import describe
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.pool import GraphPool
from stepgraph.runtime.progress import Progress
from stepgraph.runtime.session import CaptureSession

_log = logging.getLogger(__name__)


class Captured:
    """The part of a runner that is about its graphs, but for running them."""

    config: GraphConfig
    buffers: StaticBuffers
    pool: GraphPool
    _run: BatchStep
    _graphs: Graphs
    _compiled: CompiledSteps | None
    _session: CaptureSession | None  # of the graphs that are there
    _live: LiveBatches
    _audit: AddressAudit

    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Record every key of the configuration; of a lazy one the largest of each kind. With graphs disabled there is
        nothing to do.

        The step really runs while it warms up, on padded rows throughout: state outside the buffers must bear that.
        The buffers are reset before and after.

        Raises:
            CaptureError: captured already, or no key could be captured.
            ReplayError: another thread is in a step.
        """
        refuse_capture_while_serving()
        with self.pool.alone(), torch.no_grad():
            return self._capture(progress)

    def capture_pending(self, seconds: float | None = None, progress: Progress | None = None) -> CaptureReport:
        """Between two steps: record what a lazy configuration has left for later, what most steps wanted first.

        seconds: no key is begun after so many, so that a gap in the traffic is enough; at least one is recorded.
        Returns what this call recorded and dropped. The buffers keep what they hold, so that requests go on; it is
        copied meanwhile, on the device where there is room.

        Raises:
            CaptureError: from inside a step.
            InputError: seconds that are no number.
            ReplayError: a watched tensor has moved since the first capture, or another thread is in a step.
        """
        refuse_capture_while_serving()
        if seconds is not None and (not isinstance(seconds, int | float) or math.isnan(seconds)):
            raise InputError(f"capture_pending: {seconds!r} is no number of seconds")
        with self.pool.alone(), torch.no_grad():
            pending = self._graphs.pending()
            if not pending or self._session is None:
                return CaptureReport()
            self._audit.sweep()
            report = self._session.go_on(pending, seconds, progress)
            wanted = self._graphs.wanted
            self._graphs = Graphs(self.config, self.buffers, self._graphs.report | report, self._session.outputs.units)
            self._graphs.wanted = wanted
            self._tell_dropped(report)
        return report

    def prepare_loops(self, terms: LoopTerms) -> None:
        """Make the loops of all captured keys of single tokens, so that none is made while serving.

        Raises:
            CaptureError, torch.OutOfMemoryError: as `loop`.
        """
        with self.pool.alone():
            for key, graph in self._graphs.by_key.items():
                if key.query_len == 1:
                    graph.recording.loop(terms)

    def recapture(self, progress: Progress | None = None) -> CaptureReport:
        """Release and capture, after tensors that the graphs read have moved.

        Raises:
            CaptureError, ReplayError: as `capture`.
        """
        refuse_capture_while_serving()
        with self.pool.alone(), torch.no_grad():
            self._release()
            return self._capture(progress)

    def release(self) -> None:
        """Wait for the device, then give the graphs and their pool back; steps run eagerly until `capture()`.

        Raises:
            ReplayError: another thread is in a step.
        """
        with self.pool.alone():
            self._release()

    @property
    def output_bytes(self) -> int:
        """Of the outputs that all graphs share."""
        return 0 if self._session is None else self._session.outputs.nbytes

    @property
    def capture_report(self) -> CaptureReport:
        """What was captured, dropped and left for later so far; empty after a release."""
        return self._graphs.report

    @property
    def pending(self) -> list[BatchDescriptor]:
        """The keys that a lazy configuration has still to capture, those first that most steps wanted."""
        return list(self._graphs.pending())

    def coverage(self, query_len: int = 1) -> list[Decision]:
        """The route of every uniform batch from 1 to what the buffers hold, known before the first request.

        Raises:
            InputError: a query length below 1.
        """
        return self._graphs.coverage(query_len)

    def coverage_mixed(self) -> list[Decision]:
        """The route of every other batch, of one request and 1 to as many tokens as the buffers hold."""
        return self._graphs.coverage_mixed()

    def graph(self, batch: BatchDescriptor | int) -> CapturedGraph:
        """The graph of a key, or the one that runs a batch; a number is that many requests of one token each.

        Raises:
            CaptureError: no graph runs it; says why.
            InputError: more requests or tokens than the buffers hold.
        """
        return self._graphs.find(self._live.get(batch) if isinstance(batch, int) else batch)

    def graph_nodes(self, batch: BatchDescriptor | int) -> list[GraphNode]:
        """What the graph of a key or batch consists of: every node with the region that recorded it.

        Raises:
            CaptureError: as for `graph`, or the platform cannot look into its graphs.
            InputError: as for `graph`.
        """
        return self.graph(batch).recording.nodes()

    def break_costs(self) -> dict[str, BreakTotal]:
        """What each break has cost the host so far, by name. The device's side: `graph(...).recording.measure()`."""
        return self._graphs.break_costs()

    def compile_total(self) -> CompileTotal | None:
        """What compiling has taken so far, and how much of it while serving; None where nothing is compiled."""
        return None if self._compiled is None else self._compiled.total()

    def _capture(self, progress: Progress | None) -> CaptureReport:
        if self._graphs:
            raise CaptureError("captured already; call release() first")
        self._session = CaptureSession(self.config, self.buffers, self.pool, self._run, self._compiled)
        try:
            report = self._session.start(progress)
        except BaseException:
            self._release()
            raise
        self._graphs = Graphs(self.config, self.buffers, report, self._session.outputs.units)
        self._audit.remember()
        self._tell_dropped(report)
        for cliff in self._graphs.cliffs():
            _log.warning("%s", cliff)
        return report

    def _tell_dropped(self, report: CaptureReport) -> None:
        for key, why in report.dropped.items():
            _log.warning("no graph of %s: %s", describe(key), why)
        if report.dropped:
            _log.warning("%s", self._graphs.covered())

    def _release(self) -> None:
        self._graphs.release()
        self._graphs = Graphs(self.config, self.buffers, CaptureReport(), {})
        self._session = None  # and with it the outputs
        if self._compiled is not None:
            self._compiled.forget()
        self._audit.forget()
        self.pool.renew()
        self.pool.platform.give_back()
