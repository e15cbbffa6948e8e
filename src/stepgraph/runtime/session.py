"""From a configuration to its graphs: the keys, the buffers they share, and the capture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.capture import CaptureReport, Progress, capture_graphs
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.outputs import SharedOutputs, Unit
from stepgraph.runtime.pool import GraphPool

_log = logging.getLogger(__name__)


def record_keys(
    config: GraphConfig,
    buffers: StaticBuffers,
    pool: GraphPool,
    run: Callable[[BatchDescriptor], Any],
    progress: Progress | None,
) -> tuple[CaptureReport, dict[str, Unit]]:
    """Record every key of a configuration; also returns what the rows of each output count.

    run: the step on the rows of a batch or key. The buffers are reset before and after.

    Raises:
        CaptureError: not one key could be captured.
    """
    keys = capture_keys(config, max_requests=buffers.max_requests, max_tokens=buffers.max_tokens)
    if not keys:
        return CaptureReport(), {}
    rows = {key: buffers.rows(key, config.prefill.max_requests) for key in keys}
    most_tokens, most_requests = (max(r[unit] for r in rows.values()) for unit in ("token", "request"))
    outputs = SharedOutputs(buffers.slab, most_tokens, most_requests)

    def step(key: BatchDescriptor) -> dict[str, torch.Tensor]:
        return outputs.collect(run(key), rows[key]["token"], rows[key]["request"])

    buffers.reset()
    try:
        report = capture_graphs(pool, keys, step, warmups=config.warmups, debug=config.debug, progress=progress)
        for probe in _probes(report, buffers):
            if outputs.maybe_fixed or (outputs.undecided and not probe.is_uniform):
                _learn_from(probe, outputs, pool, run)
    finally:
        buffers.reset()
    buffers.platform.synchronize()  # the first call may come on any stream
    return report, outputs.units


def _probes(report: CaptureReport, buffers: StaticBuffers) -> list[BatchDescriptor]:
    """Batches that tell apart what the keys may not have told: tokens, requests, and a size that is always the same."""
    if any(key.is_relaxed for key in report.graphs):
        return [BatchDescriptor.mixed(tokens, 1) for tokens in (2, 1) if tokens <= buffers.max_tokens]
    key = next(iter(report.graphs))
    return [BatchDescriptor.decode(1, key.query_len or 1, key.num_loras)]


def _learn_from(
    probe: BatchDescriptor, outputs: SharedOutputs, pool: GraphPool, run: Callable[[BatchDescriptor], Any]
) -> None:
    try:
        outputs.learn(pool.platform.warm_up(lambda: run(probe)), probe.num_tokens, 1)
    except Exception as error:
        if not probe.is_uniform:
            raise
        _log.warning(  # it serves larger batches, so it need not run at one request
            "the step does not run at one request (%s), so a size that is always the same and one row a request are "
            "not told apart: outputs that fit both are cut to the real requests",
            error,
        )


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
