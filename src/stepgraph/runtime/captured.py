"""What a runner tells of its graphs."""

from __future__ import annotations

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.capture import CapturedGraph, CaptureReport
from stepgraph.runtime.dispatch import Decision
from stepgraph.runtime.graphs import BreakTotal, Graphs
from stepgraph.runtime.live_batches import LiveBatches
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.session import CaptureSession


class Captured:
    """The questions that a runner answers about its graphs, without running any of them."""

    _graphs: Graphs
    _live: LiveBatches
    _session: CaptureSession | None

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
        """The route of every uniform batch from 1 to what the buffers hold, known before the first request."""
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
