"""A KV cache without an estimate, on an H200: what it gets after the capture, its far end, and giving it back.

python benchmarks/h200_kv.py
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import commit, machine, versions, write_result

from stepgraph import SamplingParams
from stepgraph.engine.budget import FRACTION, MARGIN
from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import graph_config, largest_batch
from stepgraph.engine.kv_plan import KVPlan, kv_plan
from stepgraph.engine.llm import attention_shape
from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import get_backend
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualRange

SHAPE, MAX_LEN, ROWS, CHUNK = "llama-3-8b", 8192, 512, 512
REQUESTS, NEW_TOKENS = 48, 24
BAR = 0.99  # of what is left of the fraction
MIB, GIB = 1 << 20, 1 << 30
PIECES = (2, 16, 64, 256, 1024)  # MiB


def start() -> tuple[KVPlan, EngineCore, dict[str, Any]]:
    """An engine as LLM starts it, and how that went."""
    platform = platform_for("cuda")
    config, device, dtype = SHAPES[SHAPE], platform.device, torch.bfloat16
    tokens = most_tokens(CHUNK, ROWS)
    graphs = graph_config("FULL_DECODE_ONLY", None, max_num_seqs=ROWS, step_tokens=tokens, device=device)
    rows = largest_batch(graphs, ROWS)
    plan = kv_plan(platform, None, max_num_seqs=ROWS, rows=rows, tokens=max(rows, tokens), penalties=True)
    plan.require_fit(config, dtype, MAX_LEN)
    model = random_model(SHAPE, device=device, dtype=dtype, max_positions=MAX_LEN, operations="unfused")
    plan.took("weights")
    backend = get_backend(None, device, attention_shape(config), max_rows=rows, max_len=MAX_LEN)
    plan.took("attention workspaces")
    core = EngineCore(
        model,
        backend,
        graphs,
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=plan.num_blocks(config, dtype, MAX_LEN),
        chunk_tokens=CHUNK,
        memory=plan.virtual,
    )
    plan.took("step buffers")
    at_capture = core.kv_memory.num_blocks
    report = core.capture()
    table = plan.settle(core)
    told = {"table": table.as_dict(), "graphs": len(report.graphs), "capture_seconds": report.seconds}
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


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def timed(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def piece_times(device: torch.device) -> list[dict[str, float]]:
    """Milliseconds to map, zeroing included, and to give back 8 GiB in pieces of several sizes."""
    found = []
    for piece in PIECES:
        made = VirtualRange(cuda_virtual_memory(device), 8 * GIB, piece=piece * MIB)
        grow, shrink = timed(lambda: made.grow(8 * GIB)), timed(lambda: made.shrink(0))  # noqa: B023
        found.append({"piece_mib": piece, "map_ms": grow * 1e3, "give_back_ms": shrink * 1e3})
        print(found[-1], flush=True)
    return found


def main() -> int:
    plan, core, told = start()
    kv, wrong = core.kv_memory, []
    for row in told["table"]["rows"]:
        print(f"{row['name']:40} {row['bytes'] / MIB:12,.1f} MiB")
    others = plan.budget.taken - kv.nbytes
    share = kv.nbytes / (plan.budget.allowed - others - MARGIN)
    if share < BAR:
        wrong.append(f"the cache gets {share:.2%} of what is left")
    everything, tenth = kv.num_blocks, kv.num_blocks // 10
    print(
        f"{told['blocks_at_capture']} blocks at capture, {everything} after it: {share:.3%} of what is left", flush=True
    )

    near = decode(core, far=False)
    runs = {"at the far end": decode(core, far=True)}
    highest = float(kv.blocks[-1].abs().max())
    if not highest > 0:
        wrong.append("nobody wrote the last block")
    before, full_bytes = free(), kv.nbytes
    seconds = {"shrink": timed(lambda: core.resize_kv(tenth))}
    given_back = free() - before
    if given_back < full_bytes - kv.nbytes - 64 * MIB:
        wrong.append(f"{given_back / GIB:.1f} GiB came back of {(full_bytes - kv.nbytes) / GIB:.1f}")
    runs["in a tenth"] = decode(core, far=True)
    pieces = piece_times(core.model.device)
    seconds["grow"] = timed(lambda: core.resize_kv(everything))
    drift = before - free()
    if abs(drift) > 4 * MIB:
        wrong.append(f"{drift / MIB:.1f} MiB more are taken after shrinking and growing back")
    runs["grown back, at the far end"] = decode(core, far=True)
    wrong += [f"tokens {where} differ from those at the start" for where, tokens in runs.items() if tokens != near]

    def shrink_under_way(step: int) -> None:
        if step == 20:
            core.resize_kv(tenth)

    preempted = decode(core, far=True, between=shrink_under_way)
    same = sum(a == b for one, two in zip(near, preempted, strict=True) for a, b in zip(one, two, strict=True))
    print(f"{core.scheduler.preemptions} preempted by shrinking: {same} of {REQUESTS * NEW_TOKENS} tokens the same")
    core.resize_kv(everything)
    report = core.verify()
    if not report.ok:
        wrong.append(f"replays differ from eager: {report}")
    if kv.num_blocks != everything:
        wrong.append(f"{kv.num_blocks} blocks after verify, of {everything}")
    rows = [
        ["blocks while capturing", told["blocks_at_capture"]],
        ["blocks after it", everything],
        ["KV cache, GiB", kv.nbytes / GIB],
        ["of what is left, %", share * 100],
        ["given back by shrinking to a tenth, GiB", given_back / GIB],
        ["seconds to shrink", seconds["shrink"]],
        ["seconds to grow back, zeroed", seconds["grow"]],
        ["more taken afterwards, MiB", drift / MIB],
        ["keys verified against eager", len(report.keys)],
    ]
    write_result(
        {
            "name": "h200_kv",
            "definition": f"Llama-3-8B's shape, random bfloat16 weights, {told['graphs']} decode sizes, prefill eager, "
            f"memory fraction {FRACTION}, margin {MARGIN // MIB} MiB. The cache's addresses are reserved, the least is "
            f"mapped, graphs are captured, the largest eager step is run, and what is left is mapped. "
            f"{REQUESTS} greedy requests of 64 to 700 tokens give the same {NEW_TOKENS} tokens each at the cache's "
            f"start, at its far end, in a tenth of it, and after growing back; then every graph is replayed against "
            f"eager.",
            "unit": "as named",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["", "value"],
            "rows": rows,
            "budget": told["table"],
            "capture_seconds": told["capture_seconds"],
            "pieces": pieces,
            "preempted": {"requests": core.scheduler.preemptions, "same_tokens": same, "of": REQUESTS * NEW_TOKENS},
            "samples": seconds,
        }
    )
    print("; ".join(wrong) or "within the bars")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
