"""Llama-3-8B's shape on an H200: piecewise against breakable, full and eager, compiled and not.

python benchmarks/h200_piecewise.py
"""

from __future__ import annotations

import copy
import statistics
import sys
from functools import partial
from typing import Any

import torch
from common import commit, device_ms, in_turns, machine, quantiles, ratio, versions, write_result

from stepgraph import SamplingParams
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.llm import attention_shape
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.random_model import random_model
from stepgraph.engine.request import Request
from stepgraph.engine.sampling_state import sampling_inputs
from stepgraph.ops.attention import get_backend
from stepgraph.ops.operations import get_operations
from stepgraph.runtime import GraphConfig, GraphRunner, Ladder

SHAPE, DEVICE, DTYPE, MAX_LEN, CONTEXT = "llama-3-8b", "cuda", torch.bfloat16, 4096, 512
ROWS, TOKENS = (1, 16, 64), (1, 16, 128, 512, 2048)
ROUNDS, STEPS_A_ROUND = 12, 3
PIECEWISE = "reference, breakable, compiled"  # first, so that its compile seconds are those of a cold cache
GRAPHS = {"breakable": "PIECEWISE", "full": "FULL", "eager": "NONE"}


class Ways:
    """One operation set's engine, and the runners that share its step and buffers, by the name of the way."""

    def __init__(self, model: DecoderModel, compilers: tuple[str, ...]) -> None:
        device, blocks = model.device, blocks_for(MAX_LEN)
        rows, per_row = max(ROWS), blocks_for(CONTEXT + 1)
        backend = get_backend(None, device, attention_shape(model.config), max_rows=rows, max_len=MAX_LEN)
        ladders = {"ladder": Ladder.explicit(ROWS), "prefill_ladder": Ladder.explicit(TOKENS)}
        self.core = EngineCore(
            model,
            backend,
            GraphConfig.preset("FULL", **ladders),
            max_num_seqs=rows,
            max_model_len=MAX_LEN,
            num_blocks=1 + blocks + rows * per_row,
            chunk_tokens=max(TOKENS),
            penalties=False,
        )
        self.core.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
        self.buffers, step = self.core.buffers, self.core.runner._step
        self.runners = {
            f"{model.operations.name}, {graphs}{'' if compiler == 'off' else ', compiled'}": GraphRunner(
                step, self.buffers, GraphConfig.preset(mode, **ladders, compile=compiler)
            )
            for compiler in compilers
            for graphs, mode in GRAPHS.items()
        }
        order = torch.randperm(blocks + rows * per_row, generator=torch.Generator().manual_seed(2)).int() + 1
        width = self.buffers["block_tables"].shape[1]
        self.long, self.short = torch.zeros(1, width).int(), torch.zeros(rows, width).int()
        self.long[0, :blocks] = order[:blocks]
        self.short[:, :per_row] = order[blocks:].view(rows, per_row)
        self.prompt = torch.randint(model.config.vocab_size, (max(TOKENS),), generator=torch.Generator().manual_seed(3))

    def stage(self, size: int, *, decode: bool) -> None:
        """`size` rows that decode at CONTEXT, or one prompt of so many tokens; a prompt of one stands at CONTEXT."""
        self.rows = size if decode else 1
        self.end = CONTEXT if decode or size == 1 else size
        tables = self.short[:size] if decode else self.long
        state = {"tokens": [1], "positions": [0], "seq_lens": [0]}
        self.buffers.patch(list(range(self.rows)), **{k: v * self.rows for k, v in state.items()}, block_tables=tables)
        requests = [Request(i, [1], SamplingParams(temperature=0), 7, 16) for i in range(self.rows)]
        brought = [1] * self.rows if decode else [size]
        self.inputs = {
            **sampling_inputs(requests, penalties=False),
            "query_lens": brought,
            "prompt_tokens": [-1] * size if decode else self.prompt[:size],
        }
        self.call: dict[str, Any] = {"num_requests": self.rows} if decode else {"num_requests": 1, "num_tokens": size}

    def rewind(self) -> None:
        self.buffers["positions"][: self.rows] = self.end - 1
        self.buffers["seq_lens"][: self.rows] = self.end
        self.buffers["tokens"][: self.rows] = 1

    def tokens(self, way: str) -> list[int]:
        """Twice, since the first step of a way may compile."""
        for _ in range(2):
            self.rewind()
            output = self.runners[way](**self.call, **self.inputs)
        return output.tokens.tolist()

    def ms(self, way: str) -> float:
        runner = self.runners[way]
        return statistics.median(device_ms(lambda: runner(**self.call), STEPS_A_ROUND, before=self.rewind, warm=1))


def capture(runner: GraphRunner) -> dict[str, Any]:
    report, compiled = runner.capture(), runner.compile_total()
    found: dict[str, Any] = {"graphs": len(report.graphs), "capture seconds": report.seconds}
    found["dropped"] = [f"{key}: {why}" for key, why in report.dropped.items()]
    if compiled is not None:
        found |= {"compile seconds": compiled.seconds, "pieces": compiled.pieces, "distinct": compiled.distinct}
    return found


@torch.inference_mode()
def main() -> int:
    model = random_model(SHAPE, device=DEVICE, dtype=DTYPE, max_positions=MAX_LEN)
    plain = copy.copy(model)
    plain.operations = get_operations("reference", model.device, model.operations._shape)
    sides = [Ways(plain, ("inductor", "off"))]
    if model.operations.name != "reference":
        sides.append(Ways(model, ("off",)))
    homes = {way: side for side in sides for way in side.runners}
    captures = {}
    for way, side in homes.items():
        captures[way] = capture(side.runners[way])
        print(way, captures[way], flush=True)
    wrong = [f"{way}: dropped {found['dropped']}" for way, found in captures.items() if found["dropped"]]
    rows, samples, chosen = [], {}, {}
    cases = [*(("decode", n) for n in ROWS), *(("prefill", n) for n in TOKENS)]
    for phase, size in cases:
        for side in sides:
            side.stage(size, decode=phase == "decode")
        name = f"{phase} of {size}"
        chosen[name] = {way: side.tokens(way) for way, side in homes.items()}
        for group in ({way for way in homes if "compiled" in way}, {way for way in homes if "compiled" not in way}):
            for side in sides:
                said = {tuple(chosen[name][way]) for way in group if homes[way] is side}
                if len(said) > 1:
                    wrong.append(f"{name}: ways of one arithmetic differ: {sorted(group)}")
        row: list[Any] = [name]
        for way in homes:
            if way == PIECEWISE:
                continue
            pairs = in_turns(ROUNDS, partial(homes[way].ms, way), partial(homes[PIECEWISE].ms, PIECEWISE))
            samples[f"{name}, {way} and piecewise"] = pairs
            if len(row) == 1:
                row.append(quantiles([piecewise for _, piecewise in pairs])["median"])
            found = ratio(pairs)
            row += [quantiles([ms for ms, _ in pairs])["median"], f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"]
        rows.append(row)
        print(row, flush=True)
    serving = {way: homes[way].runners[way].stats.compiles for way in homes}
    late = [way for way, count in serving.items() if count and "eager" not in way]
    if late:
        wrong.append(f"compiled while serving: {late}")
    others = [column for way in homes if way != PIECEWISE for column in (way, "/ piecewise")]
    cold = captures[PIECEWISE]
    write_result(
        {
            "name": "h200_piecewise",
            "definition": f"Llama-3-8B's shape, random bfloat16 weights: device time of a whole step, sampling "
            f"included, for decodes at context {CONTEXT} and for prompts of {TOKENS[0]} (at that context) to "
            f"{TOKENS[-1]} tokens. Piecewise is inductor on the `reference` operations, each piece in a graph of its "
            f"own, attention between them: compiled in {cold['compile seconds']:.0f} s from a cold cache "
            f"({cold['distinct']} of {cold['pieces']} pieces distinct), captured in {cold['capture seconds']:.0f} s "
            f"with that. Each other way against it, paired, in turns. `eager, compiled` runs the pieces without "
            f"graphs. `unfused` is what an engine runs by default.",
            "unit": "ms",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings") if DEVICE == "cuda" else versions("torch"),
            "commit": commit(),
            "columns": ["step", "piecewise", *others],
            "rows": rows,
            "captures": captures,
            "compiled_while_serving": serving,
            "tokens": chosen,
            "samples": samples,
        }
    )
    print("; ".join(wrong) or "ways of one arithmetic give the same tokens")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
