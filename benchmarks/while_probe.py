"""What a WHILE node costs: a chain of small kernels, launched graph by graph and in one loop, plain and programmatic.

PYTHONPATH=src:tests python benchmarks/while_probe.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from common import commit, machine, quantiles, versions, write_result
from ops.late_writer import write_late

from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.base import LoopTerms

RUNS, REPEATS, LENGTHS = 1000, 20, (2, 20, 200)


def plain(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x + 1)


def span_us(call: Callable[[], object], mark: Callable[[], None]) -> tuple[float, float]:
    """Of a call: the device's time by events, and the host's until it has returned and waited."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    call()
    stop.record()
    submitted = time.perf_counter() - begun
    mark()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3, submitted * 1e6


@torch.inference_mode()
def main() -> int:
    platform = platform_for("cuda")
    terms, mark = LoopTerms.on(platform, RUNS), platform.mark(asleep=True)
    x, y = (torch.zeros(1, 64, device="cuda") for _ in range(2))
    rows, samples = [], {}

    def wait() -> None:
        mark.set()
        mark.wait()

    for name, kernel in (("plain", plain), ("programmatic, late", write_late)):
        for length in LENGTHS:

            def step(kernel: Callable[..., None] = kernel, length: int = length) -> None:
                for _ in range(length):
                    kernel(x, y)

            platform.warm_up(step)
            recording, _ = platform.record(step, platform.new_pool())
            loop = recording.loop(terms)

            def graphs(replay: Callable[[], None] = recording.replay) -> None:
                for _ in range(RUNS):
                    replay()

            for kind, call in (("graph by graph", graphs), ("one loop", partial(loop))):
                found = [span_us(call, wait) for _ in range(REPEATS)]
                if kind == "one loop" and int(terms.told) != RUNS:
                    raise RuntimeError(f"{int(terms.told)} runs instead of {RUNS}")
                device = quantiles([device / RUNS for device, _ in found])
                host = statistics.median(host for _, host in found)
                rows.append([name, recording.num_nodes or length, kind, *device.values(), host])
                samples[f"{name}, {length}, {kind}"] = found
                print(rows[-1], flush=True)
            recording.release()
    write_result(
        {
            "name": "while_probe",
            "definition": f"{RUNS} runs of a chain of small kernels, each a graph launch or all in one launch with a "
            "WHILE node. Device: µs a run. Host: µs to submit all runs.",
            "unit": "µs",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["kernels", "nodes", "kind", "p10", "median", "p90", "host"],
            "rows": rows,
            "samples": samples,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
