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
from memory_process import KV_BLOCKS, Process, bytes_used

from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import block_bytes
from stepgraph.runtime import GraphPool, GraphRunner, Ladder
from stepgraph.runtime import capture as capture_module
from stepgraph.runtime.memory.limit import OutOfMemoryAt
from stepgraph.runtime.platforms import cuda as cuda_module
from stepgraph.runtime.platforms import cuda_driver, cuda_segments
from stepgraph.runtime.session import CaptureSession

FRACTION, MIB = 0.9, 1 << 20


def variants(core: EngineCore, turns: int = 5) -> dict[str, Any]:
    """Seconds of a whole ladder, each way paired with one warm-up a size, and bytes of the way's own pools."""
    taken: list[int] = []

    def seconds(warmups: int = 1, ascending: bool = False, before_each: Callable[[], Any] | None = None) -> float:
        config = replace(core.runner.config, warmups=warmups)
        runner = GraphRunner(core.runner._run.step, core.buffers, config)
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
        "one warm-up in all": lambda: seconds(0),
        "two warm-ups a size": lambda: seconds(2),
        "ascending": lambda: seconds(ascending=True),
        "the collector runs": collecting,
        "synchronise, empty_cache and collect a size": lambda: seconds(before_each=synchronise),
        "regions not noted": without_regions,
    }
    found = {}
    for name, way in ways.items():
        pools: list[int] = []

        def noted(way: Callable[[], float] = way, pools: list[int] = pools) -> float:
            took = way()
            pools.append(taken[-1])
            return took

        pairs = in_turns(turns, noted, seconds)
        found[name] = {"pairs": pairs, "ratio": ratio(pairs), "pool": [min(pools), max(pools)]}
    seconds()
    return {"ways": found, "pool_as_it_is": taken[-1]}


def update(runner: GraphRunner) -> dict[str, Any]:
    """ms a size: an executable made from a larger size's by an update, against one made anew, each with its upload.

    Spoils the graphs. Empty where torch does not hand out its executables.
    """
    driver, stream = cuda_driver.libcuda(), torch.cuda.current_stream().cuda_stream
    graphs = [graph.recording._graph for graph in runner.capture_report.graphs.values()]  # type: ignore[attr-defined]
    updated: list[float] = []
    anew: list[float] = []
    refused = 0
    if not all(hasattr(graph, "raw_cuda_graph_exec") for graph in graphs):
        return {"refused": refused, "updated_ms": updated, "anew_ms": anew}
    for larger, smaller in pairwise(graphs):
        info, made = (ctypes.c_char * 64)(), ctypes.c_void_p()
        graph, executable = ctypes.c_void_p(smaller.raw_cuda_graph()), larger.raw_cuda_graph_exec()
        torch.cuda.synchronize()
        started = perf_counter()
        if driver.cuGraphExecUpdate_v2(ctypes.c_void_p(executable), graph, info):
            refused += 1
        else:
            cuda_driver.upload(executable, stream)
            updated.append((perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
        started = perf_counter()
        error = driver.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        if error:
            raise RuntimeError(f"the driver makes no executable: error {error}")
        cuda_driver.upload(made.value or 0, stream)
        anew.append((perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
        driver.cuGraphExecDestroy(made)
    return {"refused": refused, "updated_ms": updated, "anew_ms": anew}


def failure(process: Process, core: EngineCore, at: int) -> dict[str, Any]:
    """Recording number `at` runs out of memory, 64 MiB into it. MiB: against a ladder without that size, and before."""
    step, config = core.runner._run.step, core.runner.config
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
        "size": lost,
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


def start_ups(shape: str) -> dict[str, Any]:
    """MiB used after each of ten start-ups in one process, released again, less those after the first."""
    used, seconds = [], []
    for _ in range(11):
        process = Process(shape)
        started = perf_counter()
        core = process.core("FULL", Ladder.vllm(64), rows=64)
        core.capture()
        seconds.append(perf_counter() - started)
        core.runner.release()
        platform = process.platform
        del process, core
        used.append(bytes_used(platform))
    return {"growth": [(one - used[0]) / MIB for one in used[1:]], "seconds": seconds}


def maximum(process: Process, most: int) -> dict[str, Any]:
    """What a ladder that ends at `most` costs, and how many KV blocks the fraction then has room for. In a process of
    its own, with buffers for 512 rows whatever the ladder."""
    core = process.core("FULL_DECODE_ONLY", Ladder.vllm(most), rows=512)
    report = core.capture()
    used = process.used()
    costs = [graph.cost for graph in report.graphs.values()]
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
