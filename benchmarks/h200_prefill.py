"""Prefill of Llama-3-8B's shape on an H200: eager, in graphs around attention, and in one graph.

python benchmarks/h200_prefill.py
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import Any

import torch
from common import commit, device_ms, in_turns, machine, quantiles, ratio, versions, write_result

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.random_model import random_model
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import sampling_inputs
from stepgraph.ops.attention import get_backend
from stepgraph.runtime import BatchDescriptor, GraphConfig, GraphRunner, Ladder

SHAPE, MAX_LEN, CONTEXT = "llama-3-8b", 4096, 512
SIZES = (1, 16, 128, 512, 2048)
ROUNDS, STEPS_A_ROUND = 12, 3
BAR = 1.15  # of the decode step's time, for a prefill of one token in one graph


class OneRequest:
    """Three ways to run the same step on the same buffers."""

    def __init__(self, model: DecoderModel) -> None:
        device, blocks = model.device, blocks_for(MAX_LEN)
        backend = get_backend(None, device, attention_shape(model.config), max_rows=1, max_len=MAX_LEN)
        ladders = {"ladder": Ladder.explicit([1]), "prefill_ladder": Ladder.explicit(SIZES)}
        self.core = EngineCore(
            model,
            backend,
            GraphConfig.preset("FULL", **ladders),
            max_num_seqs=1,
            max_model_len=MAX_LEN,
            num_blocks=blocks + 1,
            chunk_tokens=max(SIZES),
            penalties=False,
        )
        self.core.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
        self.buffers = self.core.buffers
        step, buffers = self.core.runner._run.step, self.buffers
        self.runners = {
            "full": self.core.runner,
            "breakable": GraphRunner(step, buffers, GraphConfig.preset("PIECEWISE", **ladders)),
            "eager": GraphRunner(step, buffers, GraphConfig.preset("NONE")),
        }
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)) + 1
        self.tables = order[None].int()
        self.prompt = torch.randint(model.config.vocab_size, (max(SIZES),), generator=torch.Generator().manual_seed(3))

    def capture(self, way: str) -> dict[str, float]:
        """Seconds, and MiB that the device's free memory and torch's reservation changed by."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        report = self.runners[way].capture()
        torch.cuda.synchronize()
        return {
            "graphs": len(report.graphs),
            "seconds": report.seconds,
            "device MiB": (free - torch.cuda.mem_get_info()[0]) / 2**20,
            "of it reserved by torch, MiB": (torch.cuda.memory_reserved() - reserved) / 2**20,
            **{f"seconds at {key.num_tokens} tokens": graph.seconds for key, graph in report.graphs.items()},
        }

    def stage(self, tokens: int, *, decode: bool = False) -> dict[str, Any]:
        """Put one request in row 0 and its step's inputs in the buffers; returns how a runner is then called."""
        self.end = CONTEXT if tokens == 1 else tokens
        self.buffers.patch([0], tokens=[1], positions=[0], seq_lens=[0], block_tables=self.tables)
        call: dict[str, Any] = {"num_requests": 1} if decode else {"num_requests": 1, "num_tokens": tokens}
        inputs = sampling_inputs([Request(0, [1], SamplingParams(temperature=0), 7, 16)], penalties=False)
        self.rewind()
        self.runners["eager"](**call, query_lens=[tokens], prompt_tokens=self.prompt[:tokens], **inputs)
        return call

    def rewind(self) -> None:
        self.buffers["positions"].fill_(self.end - 1)
        self.buffers["seq_lens"].fill_(self.end)
        self.buffers["tokens"].fill_(1)

    def token(self, way: str, call: dict[str, Any]) -> int:
        self.rewind()
        return int(self.runners[way](**call).tokens[0])

    def ms(self, way: str, call: dict[str, Any], count: int = STEPS_A_ROUND) -> float:
        runner = self.runners[way]
        return statistics.median(device_ms(lambda: runner(**call), count, before=self.rewind, warm=1))


@torch.inference_mode()
def main() -> int:
    model = random_model(SHAPE, device="cuda", dtype=torch.bfloat16, max_positions=MAX_LEN, operations="unfused")
    one = OneRequest(model)
    captures = {way: one.capture(way) for way in ("full", "breakable")}
    print(*captures.items(), sep="\n")
    rows, samples, wrong = [], {}, []
    cases: list[tuple[str, int, bool]] = [("decode", 1, True), *((f"prefill of {n}", n, False) for n in SIZES)]
    for name, tokens, decode in cases:
        call = one.stage(tokens, decode=decode)
        chosen = {way: one.token(way, call) for way in one.runners}
        if len(set(chosen.values())) > 1:
            wrong.append(f"{name}: tokens differ {chosen}")
        row: list[Any] = [name]
        for way in ("breakable", "full"):
            pairs = in_turns(ROUNDS, partial(one.ms, "eager", call), partial(one.ms, way, call))
            samples[f"{name}, eager and {way}"] = pairs
            if way == "breakable":
                row.append(quantiles([eager for eager, _ in pairs])["median"])
            found = ratio(pairs)
            row += [quantiles([b for _, b in pairs])["median"], f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"]
        rows.append(row)
        print(row, flush=True)
    call = one.stage(1)
    full = one.runners["full"]
    pairs = in_turns(
        ROUNDS,
        lambda: statistics.median(device_ms(lambda: full(**call), 10, before=one.rewind)),
        lambda: statistics.median(device_ms(lambda: full(num_requests=1), 10, before=one.rewind)),
    )
    one_token = ratio(pairs)
    samples["one-token prefill and decode, full"] = pairs
    if one_token[0] > BAR:
        wrong.append(f"a one-token prefill takes {one_token[0]:.2f} of a decode step, over {BAR}")
    breaks = {}
    for key in (BatchDescriptor.decode(1), BatchDescriptor.relaxed(128)):
        one.stage(key.num_tokens, decode=key.is_uniform)
        one.rewind()
        costs = one.runners["breakable"].graph(key).recording.measure(5)
        breaks[str(key)] = {
            field: statistics.median(getattr(cost, field) for cost in costs)
            for field in ("host_us", "idle_us", "busy_us")
        } | {"breaks": len(costs)}
    told = "; ".join(
        f"{way}: {c['graphs']:.0f} graphs in {c['seconds']:.2f} s, {c['device MiB']:.0f} MiB"
        for way, c in captures.items()
    )
    ratio_text = f"{one_token[0]:.3f} ({one_token[1]:.3f} to {one_token[2]:.3f})"
    print(breaks, ratio_text, sep="\n")
    write_result(
        {
            "name": "h200_prefill",
            "definition": f"Llama-3-8B's shape, random bfloat16 weights, `unfused` operations: device time of a whole "
            f"step, sampling included, for a decode at context {CONTEXT} and for prompts of {SIZES[0]} (at context "
            f"{CONTEXT}) to {SIZES[-1]} tokens (from an empty cache). Eager against each, paired, in turns. Captured: "
            f"{told}. A one-token prefill in one graph takes {ratio_text} of a decode step.",
            "unit": "ms",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["step", "eager", "breakable", "eager / breakable", "full", "eager / full"],
            "rows": rows,
            "captures": captures,
            "breaks": breaks,
            "one_token": one_token,
            "samples": samples,
        }
    )
    print("; ".join(wrong) or "same tokens; one-token prefill within the bar")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
