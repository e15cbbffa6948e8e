"""A decode step of the `fused` operations on an H200, beside `unfused` and the read limit of the same run.

python benchmarks/h200_fused.py [tune] [chain] [operations] [rows]

tune: the tiles of both shapes, and of the larger one's part on two ranks, written into the package as `stepgraph tune
    tiles` does. chain: the whole dependent step at batch 1: all layers with norms, rotary embedding, attention, LM head
    and sampling; both shapes, a long context, and where the time goes. operations: every projection with what surrounds
    it, by itself, at 1 to 64 rows. rows: the step at 1 to 256 rows. Each writes a file. Without arguments all, in some
    six minutes.

Where compute-sanitizer is installed (API errors are the bindings', which ask for names that a driver may not have):
    compute-sanitizer --tool memcheck --report-api-errors no python -m pytest -m gpu tests/ops/fused
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import time
import traceback
from typing import Any

import torch
from common import commit, device_ms, in_turns, machine, quantiles, ratio, versions, write_result
from fused_step import by_operation, float32_logits, where_time_goes

from stepgraph import SamplingParams
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.parallel.shard import Shard
from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.census import census
from stepgraph.measure.decode import GREEDY, DecodeRows, load_model
from stepgraph.measure.stream import read_limit
from stepgraph.measure.tune import tune
from stepgraph.measure.work import decode_work
from stepgraph.ops.fused.tiling import ROWS, load_tiles, package_file
from stepgraph.runtime import GraphConfig, Ladder
from stepgraph.runtime.whole_file import write_whole

BIG, SMALL = "llama-3-8b", "llama-3.2-1b"
CONTEXT, LONG = 512, 8191
BARS_MS = {(BIG, CONTEXT): 3.70, (BIG, LONG): 3.92, (SMALL, CONTEXT): 0.740}
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
ROUNDS, STEPS_A_ROUND, MOST_A_LAYER = 12, 5, 6
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
MOST_ERROR = 1.2  # of the logits after all layers in bfloat16, relative to that of `unfused`


def graphs(*sizes: int) -> GraphConfig:
    return GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(sizes))


def captured(model: DecoderModel, context: int, *sizes: int) -> DecodeRows:
    decode = DecodeRows(model, graphs(*sizes), rows=max(sizes), context=context)
    decode.core.capture()
    decode.stage(sizes[0])
    return decode


def ms(decode: DecodeRows) -> float:
    return statistics.median(device_ms(decode.step, STEPS_A_ROUND, before=decode.rewind))


def floor_ms(shape: str, rows: int, context: int, limit: float) -> float:
    work = decode_work(SHAPES[shape], rows=rows, context=context, itemsize=2)
    return sum(part.nbytes for part in work) / limit * 1e3


def compared(fused: DecodeRows, unfused: DecodeRows) -> dict[str, Any]:
    pairs = in_turns(ROUNDS, lambda: ms(unfused), lambda: ms(fused))
    return {"fused": [b for _, b in pairs], "unfused": [a for a, _ in pairs], "ratio": ratio(pairs)}


def chain(limit: dict[str, float]) -> list[str]:
    table, parts, wrong, samples = [], [], [], {}
    for shape, contexts in ((BIG, (CONTEXT, LONG)), (SMALL, (CONTEXT,))):
        models = [load_model(shape, device="cuda", max_len=LONG + 1, operations=name) for name in ("fused", "unfused")]
        for context in contexts:
            fused, unfused = (captured(model, context, 1) for model in models)
            wrong += check(shape, fused, unfused)
            for params, how in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
                for decode in (fused, unfused):
                    decode.stage(1, params)
                found, least = compared(fused, unfused), floor_ms(shape, 1, context, limit["median"])
                took = quantiles(found["fused"])
                name, other = f"{shape}, context {context}, {how}", statistics.median(found["unfused"])
                table.append([name, took["median"], took["p10"], took["p90"], other, *found["ratio"], least])
                table[-1].append(least / took["median"] * 100)
                samples[name] = found
                print(*table[-1], flush=True)
                bar = BARS_MS[shape, context]
                if took["median"] > bar:
                    wrong.append(f"{name}: {took['median']:.3f} ms, over {bar}")
            fused.stage(1)
            found_parts = [[f"{shape}, context {context}: {what}", taken] for what, taken in where_time_goes(fused)]
            print(*found_parts, sep="\n", flush=True)
            parts += found_parts
            del fused, unfused
            gc.collect()
        del models
        gc.collect()
        torch.cuda.empty_cache()
    columns = ["step", "fused", "p10", "p90", "unfused", "unfused / fused", "from", "to", "floor", "% of the limit"]
    definition = (
        "One decode step at batch 1, random bfloat16 weights: all layers, LM head and sampling in one graph. `fused` "
        "and `unfused` in turns, with a 95 % interval of their ratio. Floor: bytes of weights and KV at the read limit "
        f"of {limit['median'] / 1e12:.2f} TB/s in the same run."
    )
    write("h200_fused", definition, "ms", columns, table, samples=samples, parts=parts, read_limit=limit)
    return wrong


def check(shape: str, fused: DecodeRows, unfused: DecodeRows) -> list[str]:
    """Logits as near to float32's as those of `unfused`, launches a layer, and what was chosen."""
    for decode in (fused, unfused):
        decode.rewind()
        decode.buffers["tokens"].fill_(1)
    truth = float32_logits(fused)
    error, other = (float((decode.logits() - truth).norm() / truth.norm()) for decode in (fused, unfused))
    counted = census(fused.core.runner.graph_nodes(1))
    model = fused.core.model
    chosen = model.describe(1)
    print(f"{shape}: logits {error:.3f} from float32's, unfused's {other:.3f}")
    print(f"{counted.total} nodes, {sorted(set(counted.layers))} a layer")
    print(*(f"  {name}: {text}" for name, text in chosen.items()), sep="\n", flush=True)
    wrong = []
    if not error <= MOST_ERROR * other:
        wrong.append(f"{shape}: logits are {error:.3f} from float32's, those of unfused {other:.3f}")
    if max(counted.layers) > MOST_A_LAYER:
        wrong.append(f"{shape}: {max(counted.layers)} launches a layer")
    return wrong


def by_rows(limit: dict[str, float]) -> list[str]:
    models = [load_model(BIG, device="cuda", max_len=CONTEXT + 1, operations=name) for name in ("fused", "unfused")]
    fused, unfused = (captured(model, CONTEXT, *SIZES) for model in models)
    table, wrong, samples = [], [], {}
    for size in SIZES:
        for decode in (fused, unfused):
            decode.stage(size)
        found, least = compared(fused, unfused), floor_ms(BIG, size, CONTEXT, limit["median"])
        took, other = quantiles(found["fused"]), statistics.median(found["unfused"])
        nodes = sorted(set(census(fused.core.runner.graph_nodes(size)).layers))
        samples[str(size)] = found
        told = " or ".join(map(str, nodes))
        table.append([size, took["median"], took["p10"], took["p90"], other, *found["ratio"], least, told])
        print(*table[-1], flush=True)
        if found["ratio"][0] < 0.99:
            wrong.append(f"{size} rows: fused takes {took['median']:.3f} ms, unfused {other:.3f}")
    columns = ["rows", "fused", "p10", "p90", "unfused", "unfused / fused", "from", "to", "floor", "launches a layer"]
    definition = (
        f"One greedy decode step of {BIG} at a context of {CONTEXT} by its number of rows, `fused` and `unfused` in "
        "turns, with a 95 % interval of their ratio. Floor: bytes at the read limit."
    )
    write("h200_fused_rows", definition, "ms", columns, table, samples=samples, read_limit=limit)
    return wrong


def write(name: str, definition: str, unit: str, columns: list[str], rows: list[list[Any]], **more: Any) -> None:
    where = {"machine": machine(), "versions": versions("torch", "triton", "cuda-bindings"), "commit": commit()}
    told = {"name": name, "definition": definition, "unit": unit, "columns": columns, "rows": rows}
    write_result({**told, **where, **more})


def operations(limit: dict[str, float]) -> list[str]:
    columns = ["shape", "operation", "rows", "tile", "µs", "library, µs", "TB/s", "% of the limit"]
    definition = (
        "One projection with all that surrounds it (norm, rotary embedding and KV write, SwiGLU, residual) in a graph "
        "of many with different weights, as it is chosen here and with the library's projection. Bytes of the weight "
        f"alone; the read limit is {limit['median'] / 1e12:.2f} TB/s in the same run."
    )
    table = [row for shape in (BIG, SMALL) for row in by_operation(shape, limit["median"])]
    write("h200_fused_operations", definition, "µs", columns, table, samples={}, read_limit=limit)
    return []


def tune_all(limit: dict[str, float]) -> list[str]:
    device = torch.cuda.get_device_name()
    for shape, ranks, seconds in ((BIG, 1, 60), (SMALL, 1, 40), (BIG, 2, 45)):
        choices, result = tune(f"{shape}, {ranks} ranks", Shard(SHAPES[shape], 0, ranks).alone, ROWS, seconds)
        print(*result.notes, sep="\n", flush=True)
        tiles = load_tiles(device).updated(choices)
        write_whole(package_file(device), json.dumps(tiles.to_json(device), indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    return []


PARTS = {"tune": tune_all, "chain": chain, "operations": operations, "rows": by_rows}


@torch.inference_mode()
def main() -> int:
    asked = sys.argv[1:] or list(PARTS)
    if not set(asked) <= set(PARTS):
        print(f"parts: {', '.join(PARTS)}; not {' '.join(asked)}")
        return 2
    print(f"compute-sanitizer: {shutil.which('compute-sanitizer') or 'not installed'}")
    limit = read_limit()
    print(f"read limit {limit['median'] / 1e12:.2f} TB/s ({limit['p10'] / 1e12:.2f} to {limit['p90'] / 1e12:.2f})")
    wrong = []
    for name in asked:
        started = time.perf_counter()
        try:
            wrong += PARTS[name](limit)
        except Exception:
            traceback.print_exc()
            wrong.append(f"{name} failed")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    print("; ".join(wrong) or "all bars are met")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
