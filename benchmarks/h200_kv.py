"""A KV cache without an estimate, on an H200: what it gets after the capture, its far end, and giving it back.

python benchmarks/h200_kv.py [--exact]

--exact: only the part in float32, as JSON. It runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
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
from stepgraph.engine.memory_rows import engine_rows
from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import get_backend
from stepgraph.runtime.memory.ledger import Captured, MemoryLedger, make_ledger
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualRange

SHAPE, EXACT_SHAPE, MAX_LEN, ROWS, CHUNK = "llama-3-8b", "llama-3.2-1b", 8192, 512, 512
REQUESTS, NEW_TOKENS = 48, 24
BAR = 0.99  # of what is left of the fraction
RESIDUAL_MIB = 16
MIB, GIB = 1 << 20, 1 << 30
PIECES = (2, 16, 64, 256, 1024)  # MiB


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


def eager_peak(core: EngineCore) -> int:
    """Bytes that the largest eager step has in tensors at once, by torch's own account."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    core.run_largest_step()
    return torch.cuda.max_memory_allocated() - before


def named(ledger: MemoryLedger) -> int:
    """Bytes of all that has a name, but for the cache of keys and values and for torch's own."""
    left_out = ("KV cache", "torch: its cache")
    return sum(row.nbytes for row in ledger.rows if not row.of and row.name not in left_out)


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--exact", action="store_true")
    if parser.parse_args().exact:
        print(json.dumps(exact()))
        return 0
    command = [sys.executable, __file__, "--exact"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    in_float32 = json.loads(said.splitlines()[-1])
    print("in float32:", in_float32, flush=True)
    plan, core, told = start()
    kv, wrong = core.kv_memory, []
    if in_float32["same"] != in_float32["of"] or not in_float32["preempted"]:
        wrong.append(f"in float32 preemption changes tokens: {in_float32}")
    ledger: MemoryLedger = told["ledger"]
    if abs(ledger.residual or 0) > RESIDUAL_MIB * MIB:
        wrong.append(f"{(ledger.residual or 0) / MIB:.1f} MiB have no row")
    for row in told["table"]["rows"]:
        print(f"{row['name']:40} {row['bytes'] / MIB:12,.1f} MiB")
    others = plan.budget.taken - kv.nbytes
    beyond = others - named(ledger) - eager_peak(core)
    print(
        f"others take {others / MIB:,.1f} MiB, {beyond / MIB:,.1f} more than named rows and the eager peak", flush=True
    )
    if abs(beyond) > MARGIN:
        wrong.append(f"{beyond / MIB:.1f} MiB lie between what others took and what is known of them")
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
    same_eagerly = {"at the far end": same_tokens(near, eagerly(core))}
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

    same_eagerly["grown back"] = same_tokens(near, eagerly(core))
    of = REQUESTS * NEW_TOKENS
    again = preempted(core)
    same = same_tokens(near, again)
    print(
        f"{core.scheduler.preemptions} preempted by shrinking: {same} of {of} tokens the same; eagerly {same_eagerly}"
    )
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
        ["residual of the ledger, MiB", (ledger.residual or 0) / MIB],
        ["others beyond named rows and eager peak, MiB", beyond / MIB],
        *([f"same tokens eagerly, {where}, %", number / of * 100] for where, number in same_eagerly.items()),
        ["same tokens once preempted, bfloat16, %", same / of * 100],
        ["same tokens once preempted, float32, %", in_float32["same"] / in_float32["of"] * 100],
    ]
    write_result(
        {
            "name": "h200_kv",
            "definition": f"Llama-3-8B's shape, random bfloat16 weights, {told['graphs']} decode sizes, prefill eager, "
            f"memory fraction {FRACTION}, margin {MARGIN // MIB} MiB. The cache's addresses are reserved, the least is "
            f"mapped, graphs are captured, the largest eager step is run, and what is left is mapped. "
            f"{REQUESTS} greedy requests of 64 to 700 tokens give the same {NEW_TOKENS} tokens each at the cache's "
            f"start, at its far end, in a tenth of it, and after growing back; then every graph is replayed against "
            f"eager. A preempted request's tokens are computed again through prefill, whose sums run in another "
            f"order: in bfloat16 that may choose another token where two are nearly alike, in float32 it must not.",
            "unit": "as named",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["", "value"],
            "rows": rows,
            "budget": told["table"],
            "capture_seconds": told["capture_seconds"],
            "pieces": pieces,
            "preempted": {"requests": core.scheduler.preemptions, "same_tokens": same, "of": of, "float32": in_float32},
            "eagerly": same_eagerly,
            "ledger": ledger.as_dict(),
            "samples": seconds,
        }
    )
    print("; ".join(wrong) or "within the bars")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
