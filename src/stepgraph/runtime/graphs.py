"""What a capture leaves: the graphs, the routes to them, and where their outputs lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.breakable import BreakableRecording
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CapturedGraph, CaptureReport
from stepgraph.runtime.cliffs import cliffs
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode
from stepgraph.runtime.errors import CaptureError, InputError
from stepgraph.runtime.naming import describe
from stepgraph.runtime.outputs import StepOutput, Unit, real_rows


@dataclass
class BreakTotal:
    """What a break has cost the host so far. calls: at replays, of all graphs."""

    calls: int = 0
    host_seconds: float = 0.0


class Staged(NamedTuple):
    """A batch that is staged for one of the graphs, all looked up: who runs it again has only to replay it.

    staged: what the buffers held; once they hold anything else, this is another batch's. output: the same each time.
    """

    staged: object
    replay: Callable[[], None]
    output: StepOutput


class Graphs:
    """The graphs of one capture, or none.

    units: what the rows of each output count. again: the batch that was run again last.
    """

    def __init__(
        self, config: GraphConfig, buffers: StaticBuffers, report: CaptureReport, units: Mapping[str, Unit]
    ) -> None:
        self.report, self.by_key = report, report.graphs
        self.wanted: Counter[BatchDescriptor] = Counter()  # steps that a pending key would have run
        modes = {key: graph.mode for key, graph in report.graphs.items()}
        self.dispatcher = Dispatcher(config, buffers.max_requests, modes, report.dropped, report.pending)
        self.units = units
        self.again: Staged | None = None
        self._config, self._buffers = config, buffers
        self._ready: dict[Decision, tuple[Callable[[], None], dict[str, torch.Tensor]]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_key)

    def pending(self) -> dict[BatchDescriptor, Mode]:
        """The keys that are still to be captured, those first that most steps wanted."""
        by_traffic = sorted(self.report.pending.items(), key=lambda item: -self.wanted[item[0]])
        return dict(by_traffic)

    def replay(self, decision: Decision) -> dict[str, torch.Tensor]:
        """Run a staged batch; returns the real rows of its outputs."""
        ready = self._ready.get(decision)
        if ready is None:
            graph = self.by_key[decision.key]
            ready = graph.recording.replay, real_rows(graph.outputs, self.units, decision.batch)
            if decision.key.is_uniform:  # of mixed batches there are too many
                self._ready[decision] = ready
        replay, lent = ready
        replay()
        return lent

    def find(self, batch: BatchDescriptor) -> CapturedGraph:
        """The graph of a key, or the one that runs a batch.

        Raises:
            CaptureError: there is none; says why.
        """
        if batch in self.by_key:
            return self.by_key[batch]
        if batch.num_reqs is None:
            raise CaptureError(f"no graph of {describe(batch)} was captured")
        decision = self.dispatcher.dispatch(batch)
        if decision.mode is Mode.EAGER:
            raise CaptureError(f"no graph runs a batch of {describe(batch)}: {decision.detail}")
        return self.by_key[decision.key]

    def coverage(self, query_len: int) -> list[Decision]:
        buffers = self._buffers
        if query_len < 1:
            raise InputError(f"query_len {query_len}: a request brings at least one token")
        return self.dispatcher.coverage(min(buffers.max_requests, buffers.max_tokens // query_len), query_len)

    def coverage_mixed(self) -> list[Decision]:
        return self.dispatcher.coverage_mixed(self._buffers.max_tokens)

    def covered(self) -> str:
        """How many batches graphs run, in words."""
        kinds = {
            f"requests of {query_len} tokens" if query_len > 1 else "requests": self.coverage(query_len)
            for query_len in self._config.decode.query_lens
        }
        kinds["tokens"] = self.coverage_mixed()
        counts = (
            f"{sum(route.mode is not Mode.EAGER for route in routes)} of 1 to {len(routes)} {unit}"
            for unit, routes in kinds.items()
        )
        return f"coverage: graphs run {', '.join(counts)}"

    def cliffs(self) -> list[str]:
        """What falls off a ladder, in sentences."""
        routes = [self.coverage(query_len) for query_len in self._config.decode.query_lens]
        return [sentence for coverage in (*routes, self.coverage_mixed()) for sentence in cliffs(coverage)]

    def break_costs(self) -> dict[str, BreakTotal]:
        totals: dict[str, BreakTotal] = {}
        for graph in self.by_key.values():
            if isinstance(graph.recording, BreakableRecording):
                for a_break in graph.recording.breaks:
                    total = totals.setdefault(a_break.name, BreakTotal())
                    total.calls += a_break.calls
                    total.host_seconds += a_break.host_seconds
        return totals

    def release(self) -> None:
        """Give back what the recordings hold, once the device is done."""
        self._buffers.platform.synchronize()
        for graph in self.by_key.values():
            graph.recording.release()
        self.by_key, self.again = {}, None
        self._ready.clear()
