"""What is asked of one ladder of decode sizes: other ways to capture it, failures, rounds, and where it ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from common import in_turns, ratio
from memory_process import KV_BLOCKS, Process

from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import block_bytes
from stepgraph.runtime import GraphPool, GraphRunner, Ladder
from stepgraph.runtime import capture as capture_module
from stepgraph.runtime.memory.limit import OutOfMemoryAt
from stepgraph.runtime.platforms import cuda as cuda_module
from stepgraph.runtime.platforms import cuda_driver, cuda_segments
from stepgraph.runtime.session import CaptureSession

FRACTION, MIB = 0.9, 1 << 20


def variants(core: EngineCore, turns: int = 2) -> dict[str, Any]:
    """Seconds of a whole ladder, each way paired with how it is done."""

    def seconds(warmups: int = 1, ascending: bool = False, before_each: Callable[[], Any] | None = None) -> float:
        config = replace(core.runner.config, warmups=warmups)
        runner = GraphRunner(core.runner._step, core.buffers, config)
        session = CaptureSession(config, core.buffers, runner.pool, runner._run)
        if ascending:
            session._keys = dict(reversed(session._keys.items()))
        with torch.inference_mode(), runner.pool.alone():
            report = session.start(None if before_each is None else lambda *_: before_each())
        for graph in report.graphs.values():
            graph.recording.release()
        core.buffers.platform.give_back()
        taken.append(sum(graph.cost.pool_bytes for graph in report.graphs.values()))
        return report.seconds

    def synchronise() -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gc.collect()

    def collecting() -> float:
        frozen, off = capture_module._collector_frozen, cuda_module._collector_off
        capture_module._collector_frozen = cuda_module._collector_off = contextlib.nullcontext
        try:
            return seconds()
        finally:
            capture_module._collector_frozen, cuda_module._collector_off = frozen, off

    def without_regions() -> float:
        load = cuda_segments.load_driver
        cuda_segments.load_driver = lambda: None
        try:
            return seconds()
        finally:
            cuda_segments.load_driver = load

    ways = {
        "no warm-ups": lambda: seconds(0),
        "two warm-ups": lambda: seconds(2),
        "ascending": lambda: seconds(ascending=True),
        "the collector runs": collecting,
        "synchronise, empty_cache and collect a size": lambda: seconds(before_each=synchronise),
        "regions not noted": without_regions,
    }
    found = {}
    for name, way in ways.items():
        taken: list[int] = []
        pairs = in_turns(turns, way, seconds)
        found[name] = {"pairs": pairs, "ratio": ratio(pairs), "pool": [min(taken), max(taken)]}
    return found


def update(runner: GraphRunner) -> dict[str, Any]:
    """ms a size: an executable made from a larger size's by an update, against one made anew. Spoils the graphs."""
    driver = cuda_driver._driver()
    graphs = [graph.recording._graph for graph in runner.capture_report.graphs.values()]  # type: ignore[attr-defined]
    updated, anew, refused = [], [], 0
    for larger, smaller in pairwise(graphs):
        info, made = (ctypes.c_char * 64)(), ctypes.c_void_p()
        graph = ctypes.c_void_p(smaller.raw_cuda_graph())
        started = perf_counter()
        error = driver.cuGraphExecUpdate_v2(ctypes.c_void_p(larger.raw_cuda_graph_exec()), graph, info)
        between = perf_counter()
        driver.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        stopped = perf_counter()
        driver.cuGraphExecDestroy(made)
        anew.append((stopped - between) * 1e3)
        if error:
            refused += 1
        else:
            updated.append((between - started) * 1e3)
    return {"refused": refused, "updated_ms": updated, "anew_ms": anew}


def failure(process: Process, core: EngineCore, at: int) -> dict[str, Any]:
    """Recording number `at` runs out of memory, 64 MiB into it. MiB: against a ladder without that size, and before."""
    step, config = core.runner._step, core.runner.config
    sizes = sorted(config.decode.ladder.sizes)
    lost = sizes[-at]
    shorter = Ladder.explicit([size for size in sizes if size != lost])
    before = process.used()
    without = GraphRunner(step, core.buffers, replace(config, decode=replace(config.decode, ladder=shorter)))
    limited = GraphRunner(
        step, core.buffers, config, pool=GraphPool(OutOfMemoryAt(core.buffers.platform, at, 64 * MIB))
    )
    used = []
    with torch.inference_mode():
        for runner in (without, limited):
            report = runner.capture()
            used.append(process.used())
            ran = runner(num_requests=5)
            runner.release()
    return {
        "at": at,
        "text": next(iter(report.dropped.values())),
        "captured": len(report.graphs),
        "mode": str(ran.mode),
        "more_than_without": (used[1] - used[0]) / MIB,
        "left_after_release": (process.used() - before) / MIB,
    }


def rounds(process: Process, core: EngineCore) -> dict[str, Any]:
    """MiB used after each of ten rounds of release and recapture, less those after the first."""
    used, seconds = [], []
    with torch.inference_mode():
        for _ in range(11):
            seconds.append(core.runner.recapture().seconds)
            used.append(process.used())
        core.runner.release()
    return {"growth": [(one - used[0]) / MIB for one in used[1:]], "seconds": seconds}


def maximum(process: Process, most: int) -> dict[str, Any]:
    """What a ladder that ends at `most` costs, and how many KV blocks the fraction then has room for."""
    core = process.core("FULL_DECODE_ONLY", Ladder.vllm(most))
    report = core.capture()
    used = process.used()
    costs = [graph.cost for graph in report.graphs.values()]
    core.runner.release()
    total = process.platform.memory().total
    block = block_bytes(core.model.config, core.model.dtype)
    return {
        "max": most,
        "graphs": len(costs),
        "seconds": report.seconds,
        "pool": sum(cost.pool_bytes for cost in costs),
        "driver": sum(cost.driver_bytes for cost in costs),
        "kv_blocks": int(total * FRACTION - used) // block + KV_BLOCKS,
    }
