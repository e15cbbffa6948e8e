"""A KV cache without an estimate, on an H200: what it gets after the capture, its far end, and giving it back.

python benchmarks/h200_kv.py [--exact]

--exact: only the part in float32, as JSON. It runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from common import commit, machine, versions, write_result
from kv_engine import NEW_TOKENS, REQUESTS, decode, eagerly, exact, preempted, same_tokens, start

from stepgraph.engine.budget import FRACTION, MARGIN
from stepgraph.engine.core import EngineCore
from stepgraph.runtime.memory.ledger import MemoryLedger
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualRange

BAR = 0.99  # of what is left of the fraction
RESIDUAL_MIB = 16
MIB, GIB = 1 << 20, 1 << 30
PIECES = (2, 16, 64, 256, 1024)  # MiB


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
