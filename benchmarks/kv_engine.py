"""An engine as LLM starts it on a GPU, and tokens that it gives in several ways: for h200_kv.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import graph_config, largest_batch
from stepgraph.engine.kv_plan import KVPlan, kv_plan
from stepgraph.engine.memory_rows import engine_rows
from stepgraph.engine.model import attention_shape
from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import get_backend
from stepgraph.runtime.memory.ledger import Captured, make_ledger
from stepgraph.runtime.platforms import platform_for

SHAPE, EXACT_SHAPE, MAX_LEN, ROWS, CHUNK = "llama-3-8b", "llama-3.2-1b", 8192, 512, 512
REQUESTS, NEW_TOKENS = 48, 24


def start(
    shape: str = SHAPE, dtype: torch.dtype = torch.bfloat16, operations: str = "unfused"
) -> tuple[KVPlan, EngineCore, dict[str, Any]]:
    """An engine as LLM starts it, and how that went."""
    platform = platform_for("cuda")
    begin, device, config = platform.memory(), platform.device, SHAPES[shape]
    tokens = most_tokens(CHUNK, ROWS)
    graphs = graph_config("FULL_DECODE_ONLY", None, max_num_seqs=ROWS, step_tokens=tokens, device=device)
    rows = largest_batch(graphs, ROWS)
    plan = kv_plan(platform, None, max_num_seqs=ROWS, rows=rows, tokens=max(rows, tokens), penalties=True)
    plan.require_fit(config, dtype, MAX_LEN)
    model = random_model(shape, device=device, dtype=dtype, max_positions=MAX_LEN, operations=operations)
    plan.took("weights")
    backend = get_backend(None, device, attention_shape(config), max_rows=rows, max_len=MAX_LEN)
    plan.took("attention workspaces")
    core = EngineCore(
        model,
        backend,
        graphs,
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=plan.num_blocks(config, dtype, MAX_LEN, graphs),
        chunk_tokens=CHUNK,
        memory=plan.virtual,
    )
    plan.took("step buffers")
    at_capture = core.kv_memory.num_blocks
    report = core.capture()
    table = plan.settle(core)
    ledger = make_ledger([Captured(report)], engine_rows(core), platform.memory(), begin)
    told = {"table": table.as_dict(), "graphs": len(report.graphs), "capture_seconds": report.seconds, "ledger": ledger}
    return plan, core, told | {"blocks_at_capture": at_capture, "dropped": len(report.dropped)}


def requests() -> list[Request]:
    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    vocab = SHAPES[SHAPE].vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(64, 700))] for _ in range(REQUESTS)]
    return [Request(id, prompt, params, id, NEW_TOKENS) for id, prompt in enumerate(prompts)]


def decode(core: EngineCore, *, far: bool, between: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    """Every request's tokens. far: blocks are taken from the end of the cache. between: called before each step."""
    core.scheduler.pool._free.sort(reverse=not far)
    mine, step = requests(), 0
    for one in mine:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        between(step)
        for one, _ in core.step():
            if len(one.output) >= one.max_tokens:
                core.scheduler.remove(one)
        step += 1
    return [one.output for one in mine]


def same_tokens(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a == b for one, two in zip(some, others, strict=True) for a, b in zip(one, two, strict=True))


def preempted(core: EngineCore) -> list[list[int]]:
    """Tokens where the cache shrinks to a tenth while all requests decode, and afterwards grows back."""
    everything = core.kv_memory.num_blocks

    def shrink_under_way(step: int) -> None:
        if step == 20:
            core.resize_kv(everything // 10)

    tokens = decode(core, far=True, between=shrink_under_way)
    core.resize_kv(everything)
    return tokens


def eagerly(core: EngineCore) -> list[list[int]]:
    """Tokens at the far end without graphs, which are captured again afterwards."""
    core.runner.release()
    tokens = decode(core, far=True)
    core.capture()
    core.run_largest_step()  # torch has given back what such a step needs
    return tokens


def exact() -> dict[str, int]:
    """In float32 a token that is computed again through prefill is the one that decode chose."""
    _, core, _ = start(EXACT_SHAPE, torch.float32, "reference")
    near, again = decode(core, far=False), preempted(core)
    eager = eagerly(core)
    return {
        "preempted": core.scheduler.preemptions,
        "same": same_tokens(near, again),
        "same_eagerly": same_tokens(near, eager),
        "of": REQUESTS * NEW_TOKENS,
    }
