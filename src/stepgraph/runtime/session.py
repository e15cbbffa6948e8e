"""From a configuration to its graphs: the keys, the outputs they share, and the capture, at once or bit by bit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport, capture_graphs, let_go_of_graphs
from stepgraph.runtime.compiler.steps import CompiledSteps
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.errors import CaptureError, ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.memory.ledger import family
from stepgraph.runtime.naming import describe
from stepgraph.runtime.outputs import SharedOutputs
from stepgraph.runtime.pool import GraphPool
from stepgraph.runtime.progress import Progress

_log = logging.getLogger(__name__)


class CaptureSession:
    """Records the keys of a configuration.

    run: the step on the rows of a batch or key. compiled: the same, compiled, where the configuration asks for that;
        its first call of each key compiles.
    """

    def __init__(
        self,
        config: GraphConfig,
        buffers: StaticBuffers,
        pool: GraphPool,
        run: Callable[[BatchDescriptor], Any],
        compiled: CompiledSteps | None = None,
    ) -> None:
        self._config, self._buffers, self._pool, self._run = config, buffers, pool, run
        self._compiled = compiled
        self._keys = capture_keys(config, max_requests=buffers.max_requests, max_tokens=buffers.max_tokens)
        self._rows = {key: buffers.rows(key, config.prefill.max_requests) for key in self._keys}
        most_tokens = max((rows["token"] for rows in self._rows.values()), default=0)
        most_requests = max((rows["request"] for rows in self._rows.values()), default=0)
        self.outputs = SharedOutputs(buffers.slab, most_tokens, most_requests)

    def start(self, progress: Progress | None) -> CaptureReport:
        """Record every key; of a lazy configuration the largest of each kind. The buffers are reset before and after.

        Raises:
            CaptureError: not one key could be captured, or no memory for what tells apart the kinds of outputs. Nothing
                is left of the graphs then.
        """
        if not self._keys:
            return CaptureReport()
        now = _largest(self._keys) if self._config.lazy else self._keys
        plan = planned(self._keys, len(now))
        _log.info("capturing %s", plan)
        if progress is not None:
            progress(0, len(now), plan)
        self._buffers.reset()
        report = CaptureReport()
        try:
            report = self._record(now, progress)
            for probe in self._probes(report):
                if self.outputs.maybe_fixed or (self.outputs.undecided and not probe.is_uniform):
                    self._learn_from(probe)
        except BaseException:
            let_go_of_graphs(self._pool.platform, report.graphs)
            raise
        finally:
            self._buffers.reset()
        self._pool.platform.synchronize()  # the first call may come on any stream
        pending = {key: mode for key, mode in self._keys.items() if key not in now}
        if not report.graphs and not pending:
            key, why = list(report.dropped.items())[-1]
            raise CaptureError(f"not one size could be captured; {describe(key)}: {why}")
        return replace(report, pending=pending)

    def go_on(
        self, keys: Mapping[BatchDescriptor, Mode], seconds: float | None, progress: Progress | None
    ) -> CaptureReport:
        """Record some more keys in this order; none is begun after `seconds`. The buffers stay as they are."""
        with self._buffers.kept():
            self._buffers.reset()
            report = self._record(keys, progress, seconds)
        self._pool.platform.synchronize()
        return report

    def _record(
        self, keys: Mapping[BatchDescriptor, Mode], progress: Progress | None, seconds: float | None = None
    ) -> CaptureReport:
        config, compiled = self._config, self._compiled
        warmups = config.warmups if compiled is None else 1 + max(1, config.warmups)  # the first compiles
        return capture_graphs(
            self._pool,
            keys,
            self._step,
            warmups=warmups,
            debug=config.debug,
            progress=progress,
            seconds=seconds,
            compiled=lambda: 0.0 if compiled is None else compiled.total().seconds,
        )

    def _step(self, key: BatchDescriptor) -> dict[str, torch.Tensor]:
        rows = self._rows[key]
        return self.outputs.collect((self._compiled or self._run)(key), rows["token"], rows["request"])

    def _probes(self, report: CaptureReport) -> list[BatchDescriptor]:
        """Batches that tell apart what the keys may not have told: tokens, requests, and a size that is always the
        same."""
        if any(key.is_relaxed for key in report.graphs):
            return [BatchDescriptor.mixed(tokens, 1) for tokens in (2, 1) if tokens <= self._buffers.max_tokens]
        return [BatchDescriptor.decode(1, key.query_len or 1, key.num_loras) for key in list(report.graphs)[:1]]

    def _learn_from(self, probe: BatchDescriptor) -> None:
        try:
            self.outputs.learn(self._pool.platform.warm_up(lambda: self._run(probe)), probe.num_tokens, 1)
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                f"out of memory in an eager step of {describe(probe)}, which tells outputs of one row a request from "
                f"others; give the KV cache less memory (fewer blocks)"
            ) from error
        except Exception as error:
            if not probe.is_uniform:
                raise
            _log.warning(  # it serves larger batches, so it need not run at one request
                "the step does not run at one request (%s), so a size that is always the same and one row a request "
                "are not told apart: outputs that fit both are cut to the real requests",
                error,
            )


def planned(keys: Iterable[BatchDescriptor], now: int) -> str:
    """What will be captured, by family, and how many of them at once."""
    counts = Counter(map(family, keys))
    words = ", ".join(f"{number} {name}" for name, number in counts.items())
    later = counts.total() - now
    return f"graphs: {words}" + (f"; {now} of them now, {later} in gaps" if later else "")


def _largest(keys: Mapping[BatchDescriptor, Mode]) -> dict[BatchDescriptor, Mode]:
    """The first key of each query length: the others fit into the memory that it takes."""
    first: dict[int | None, BatchDescriptor] = {}
    for key in keys:
        first.setdefault(key.query_len, key)
    return {key: keys[key] for key in first.values()}


def require_fit(config: GraphConfig, buffers: StaticBuffers) -> None:
    """Refuse ladders that the buffers cannot hold.

    Raises:
        ConfigError: names the size and the limit.
    """
    decode, prefill = config.decode, config.prefill
    for phase, limit, unit in (
        (decode, buffers.max_requests, "requests"),
        (prefill, buffers.max_tokens, "tokens"),
    ):
        if phase.backend is not Backend.DISABLED and phase.ladder is not None and phase.ladder.max_size > limit:
            raise ConfigError(
                f"ladder: size {phase.ladder.max_size} does not fit buffers of {limit} {unit}; "
                f"end the ladder there or allocate larger buffers"
            )
