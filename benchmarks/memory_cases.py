"""The cases of h200_memory.py: each runs in a process of its own, since driver and caches are warm only once.

python benchmarks/memory_cases.py CASE FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from common import commit
from memory_ladder import failure, maximum, rounds, start_ups, update, variants
from memory_process import Process

from stepgraph.engine.core import EngineCore
from stepgraph.engine.random_model import SHAPES
from stepgraph.runtime import GraphConfig, Ladder

MAXIMA, CHUNKS = (512, 256, 128, 64), (512, 256, 128)
SCORED = replace(SHAPES["llama-3-8b"], num_kv_heads=16)


def capture_only(shape: Any = "llama-3-8b") -> dict[str, Any]:
    process = Process(shape)
    return {"first": process.session(process.core("FULL_DECODE_ONLY", Ladder.vllm(512)))}


def decode(shape: Any = "llama-3-8b") -> dict[str, Any]:
    """Everything that one ladder of 51 decode sizes is asked."""
    process = Process(shape)
    core = process.core("FULL_DECODE_ONLY", Ladder.vllm(512))
    found = {"first": process.session(core), "update": update(core.runner)}
    core.runner.release()
    found["failures"] = [failure(process, core, at) for at in (1, 26, 51)]
    found["rounds"] = rounds(process, core)
    return found


def ways(shape: Any = "llama-3-8b") -> dict[str, Any]:
    """The same ladder captured in other ways."""
    core = Process(shape).core("FULL_DECODE_ONLY", Ladder.vllm(512))
    core.capture()
    core.runner.release()
    return variants(core)


def both(shape: Any, ladder: Ladder | None = None) -> dict[str, Any]:
    """Prefill and decode in one pool, then the pools of each for a fit. ladder: only the first, with another one."""
    process = Process(shape)
    core = process.core("FULL", ladder or Ladder.vllm(512))
    found: dict[str, Any] = {"first": process.session(core)}
    core.runner.release()
    del core
    found["pools"] = []
    if ladder is None:
        for most in MAXIMA:
            found["pools"].append(one_kind(process, process.core("FULL_DECODE_ONLY", Ladder.vllm(most))))
        for chunk in CHUNKS:
            core = process.core("FULL", Ladder.explicit([1]), chunk, rows=64)
            core.runner.config = replace(core.runner.config, decode=GraphConfig().decode)
            found["pools"].append(one_kind(process, core))
    return found


def one_kind(process: Process, core: EngineCore) -> dict[str, Any]:
    found = process.session(core)
    core.runner.release()
    del core
    process.used()
    return {"kinds": found["kinds"], "seconds": found["seconds"]}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "cold": capture_only,
    "decode": decode,
    "8b": lambda: both("llama-3-8b"),
    "1b": lambda: both("llama-3.2-1b"),
    "variants": ways,
    "startups": lambda: start_ups("llama-3.2-1b"),
    **{f"max{most}": lambda most=most: maximum(Process("llama-3-8b"), most) for most in MAXIMA},
    "scored": lambda: both(SCORED, Ladder.sglang(384)),
}

if __name__ == "__main__":
    case, path = sys.argv[1], Path(sys.argv[2])
    started = perf_counter()
    found = CASES[case]()
    path.write_text(
        json.dumps({"process_seconds": perf_counter() - started, "commit": commit(), **found}), encoding="utf-8"
    )
