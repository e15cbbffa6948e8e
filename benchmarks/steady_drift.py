"""100,000 steady steps of a tiny shape with joins and leaves: the same requests give the same tokens all along.

python benchmarks/steady_drift.py [--device cuda] [--steps 100000] [--seconds 240]
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
from common import commit, machine, versions, write_result
from steady_host import TINY

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import graph_config
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.random_model import random_model
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import get_backend

ROWS, MAX_LEN, BLOCKS, CHUNK = 8, 512, 120, 64  # blocks for half of the rows at full length
WINDOWS = 10  # between two of them the engine is empty, and the probe is run
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
)


def engine(model: DecoderModel, steps_per_launch: int) -> EngineCore:
    device = model.device
    core = EngineCore(
        model,
        get_backend(None, device, attention_shape(model.config), max_rows=ROWS, max_len=MAX_LEN),
        graph_config("full", None, max_num_seqs=ROWS, step_tokens=most_tokens(CHUNK, ROWS), device=device),
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=BLOCKS,
        chunk_tokens=CHUNK,
        steps_per_launch=steps_per_launch,
    )
    core.capture()
    return core


def make(id: int) -> Request:
    """The request of this number, always the same: mostly long, some end at once, some by a token of their own."""
    rng = random.Random(id)
    prompt = [rng.randrange(TINY.vocab_size) for _ in range(rng.randint(1, 60))]
    most = rng.choice([1, 20, 200, 400])
    stops = frozenset(rng.sample(range(TINY.vocab_size), rng.choice([0, 0, 1])))
    params = SamplingParams(max_tokens=most, **SETTINGS[id % len(SETTINGS)])  # type: ignore[arg-type]
    return Request(id, prompt, params, id, most, stops=stops)


def take_out(core: EngineCore, produced: list[tuple[Request, int]]) -> int:
    """Remove those that have ended. Returns how many tokens there were."""
    for one, token in produced:
        if one.blocks and (token in one.stops or len(one.output) >= one.max_tokens):
            core.scheduler.remove(one)
    return len(produced)


def probe(core: EngineCore) -> list[list[int]]:
    """The tokens of the same requests, in the same batches whenever the engine is empty."""
    ours = [make(id) for id in range(2 * ROWS)]
    for one in ours:
        core.scheduler.add(one)
    while core.scheduler.has_work:
        take_out(core, core.step_many())
    core.step_many()  # the last step was launched ahead
    return [one.output for one in ours]


def serve(core: EngineCore, steps: int, rng: random.Random, first: int) -> tuple[int, int, int]:
    """Random traffic for so many steps, then until none is left. Returns requests, cancelled and tokens."""
    served = cancelled = tokens = 0
    scheduler, stats = core.scheduler, core.runner.stats
    left, wanted = steps, ROWS
    while left > 0 or scheduler.has_work:
        if left > 0 and len(scheduler.rows) + len(scheduler.prefilling) + len(scheduler.waiting) < wanted:
            scheduler.add(make(first + served))
            served, wanted = served + 1, rng.randint(1, ROWS + 2)
        before = stats.steps
        tokens += take_out(core, core.step_many())
        left -= stats.steps - before
        if scheduler.rows and rng.random() < 0.001 * (stats.steps - before):
            scheduler.remove(rng.choice(scheduler.rows))  # with a token on its way
            cancelled += 1
    core.step_many()
    return served, cancelled, tokens


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=240, help="of each of the two runs; what is left is not run")
    options = parser.parse_args()
    model = random_model(TINY, device=options.device, dtype=torch.float32, max_positions=MAX_LEN)
    rows, samples, wrong = [], {}, []
    for steps_per_launch in (1, 16):
        fresh = probe(engine(model, steps_per_launch))
        core, rng, started = engine(model, steps_per_launch), random.Random(0), time.perf_counter()
        served = cancelled = tokens = 0
        found: list[int] = []  # of each probe, whether it differs
        for _ in range(WINDOWS):
            if time.perf_counter() - started > options.seconds:
                break
            more = serve(core, options.steps // WINDOWS, rng, 1000 + served)
            served, cancelled, tokens = served + more[0], cancelled + more[1], tokens + more[2]
            found.append(int(probe(core) != fresh))
        pool, stats = core.scheduler.pool, core.runner.stats
        lost = pool.capacity - pool.num_free
        rows.append(
            [steps_per_launch, stats.steps, stats.looped_steps, served, cancelled, core.scheduler.preemptions, tokens,
             len(found), sum(found), lost, time.perf_counter() - started]
        )  # fmt: skip
        print(rows[-1], flush=True)
        name = f"{steps_per_launch} steps a launch"
        samples[name] = found
        if any(found):
            wrong.append(f"{name}: {sum(found)} of {len(found)} probes differ from a fresh engine's")
        if lost:
            wrong.append(f"{name}: {lost} blocks are lost")
        if stats.steps < options.steps:
            wrong.append(f"{name}: {stats.steps} steps of {options.steps} in the time given")
    kind = torch.device(options.device).type
    write_result(
        {
            "name": f"{kind}_steady_drift",
            "definition": f"Random traffic on {ROWS} rows of a tiny model in float32: joins, leaves by length and by "
            f"token, cancellations, preemptions, {WINDOWS} times until none is left. Then a probe: {2 * ROWS} "
            "requests, always the same, so that their batches are too. drifted: probes whose tokens are not, one by "
            "one, those of an engine that has just been made. lost: KV blocks that nobody holds and that are not free.",
            "unit": "counts; seconds",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings") if kind == "cuda" else versions("torch"),
            "commit": commit(),
            "columns": [
                "steps a launch", "steps", "in launches of many", "requests", "cancelled", "preemptions", "tokens",
                "probes", "drifted", "lost", "seconds",
            ],
            "rows": rows,
            "samples": samples,
        }
    )  # fmt: skip
    print("; ".join(wrong) or "no drift")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
