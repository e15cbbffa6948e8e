"""LoRA on an H200: a decode step of 16 rows of Llama-3-8B's shape with adapters beside the same step without.

By the `unfused` and the `fused` operations. Also what each of the adapters' launches takes, projection by projection.

python benchmarks/h200_lora.py
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from common import commit, device_ms, in_turns, machine, quantiles, ratio, versions, write_result
from lora_launches import COLUMNS, launch_times

from stepgraph import LoraConfig
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.lora import LoraSlots, with_cases
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.random_model import random_model
from stepgraph.ops.attention import get_backend
from stepgraph.runtime import GraphConfig, Ladder
from stepgraph.runtime.memory.ledger import Captured, make_ledger

SHAPE, CONTEXT, MAX_LEN, ROWS = "llama-3-8b", 512, 1024, 16
LORA = LoraConfig(slots=16, max_rank=16, cases=(0, 1, 4, 16))
BAR = 1.25  # with adapters, of without
ROUNDS, STEPS_A_ROUND = 10, 20
BATCHES = {  # name: active adapters, and the adapter of each row
    "one adapter in all rows": [0] * ROWS,
    "one adapter in half of the rows": [0, -1] * (ROWS // 2),
    "four adapters": [row % 4 for row in range(ROWS)],
    "16 adapters": list(range(ROWS)),
}
LAUNCHES_OF = ("one adapter in all rows", "16 adapters")
SETS = ("unfused", "fused")


class Batch:
    """An engine whose 16 rows decode the token at `CONTEXT`, again and again."""

    def __init__(self, model: DecoderModel) -> None:
        device, blocks = model.device, blocks_for(CONTEXT + 1)
        self.lora = LoraSlots(model.config, LORA, model.dtype, device)
        for tensor in self.lora.tensors.values():
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=torch.Generator(device).manual_seed(0))
        graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([ROWS]))
        self.core = EngineCore(
            model,
            get_backend(None, device, attention_shape(model.config), max_rows=ROWS, max_len=MAX_LEN),
            with_cases(graphs, LORA),
            max_num_seqs=ROWS,
            max_model_len=MAX_LEN,
            num_blocks=ROWS * blocks + 1,
            chunk_tokens=512,
            lora=self.lora,
        )
        self.core.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
        self.report = self.core.capture()
        tables = torch.zeros(ROWS, blocks_for(MAX_LEN), dtype=torch.int32)
        tables[:, :blocks] = torch.arange(1, ROWS * blocks + 1).view(ROWS, blocks)
        self.core.buffers.patch(
            list(range(ROWS)),
            tokens=list(range(ROWS)),
            positions=[CONTEXT - 1] * ROWS,
            seq_lens=[CONTEXT] * ROWS,
            block_tables=tables,
        )
        self.set([-1] * ROWS)

    def set(self, adapters: list[int]) -> None:
        """adapters: of each row, -1 for none. Runs a step, so that they are staged."""
        self.active = max(adapters) + 1
        self.rewind()
        index = np.array(adapters, dtype=np.int32)
        out = self.core.runner(
            num_requests=ROWS, num_loras=self.active, lora_index=index, lora_slot=index.clip(0), top_p=[1.0] * ROWS
        )
        assert out.mode == "FULL", out.detail

    def rewind(self) -> None:
        self.core.buffers["positions"].fill_(CONTEXT - 1)
        self.core.buffers["seq_lens"].fill_(CONTEXT)

    def ms(self, adapters: list[int]) -> float:
        """Of one step, the median of several, as the device sees it."""
        self.set(adapters)
        step = self.core.runner
        count = self.active
        times = device_ms(lambda: step(num_requests=ROWS, num_loras=count), STEPS_A_ROUND, before=self.rewind)
        return statistics.median(times)

    def beside_none(self) -> dict[str, list[tuple[float, float]]]:
        """Of each of BATCHES the times with adapters and without, paired."""
        none = [-1] * ROWS
        return {
            name: in_turns(ROUNDS, lambda mine=mine: self.ms(mine), lambda: self.ms(none))
            for name, mine in BATCHES.items()
        }


@torch.inference_mode()
def main() -> int:
    rows: list[list[Any]] = []
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    captures, graphs, wrong = [], {}, []
    for operations in SETS:
        model = random_model(SHAPE, device="cuda", dtype=torch.bfloat16, max_positions=MAX_LEN, operations=operations)
        batch = Batch(model)
        samples[operations] = batch.beside_none()
        for name, found in samples[operations].items():
            one, times = quantiles([with_them for with_them, _ in found]), ratio(found)
            without = statistics.median(bare for _, bare in found)
            told = "{:.3f} ({:.3f} to {:.3f})".format(*times)
            rows.append([operations, name, one["median"], one["p10"], one["p90"], without, told])
            print(rows[-1], flush=True)
            if times[0] > BAR:
                wrong.append(f"{operations}, {name}: {times[0]:.3f}")
        graphs[operations] = {str(key.num_loras): asdict(graph.cost) for key, graph in batch.report.graphs.items()}
        captures.append(f"{operations}: {_captured(batch)}")
    print(*captures, "; ".join(COLUMNS) + " (us)", sep="\n", flush=True)
    launches = launch_times(model.layers, batch.lora.layers, {name: BATCHES[name] for name in LAUNCHES_OF})
    for name, has, *columns in launches:
        print(f"{name:14}{has:34}" + "".join(f"{one:9.2f}" for one in columns))
    write_result(
        {
            "name": "h200_lora",
            "definition": f"Llama-3-8B's shape, random bfloat16 weights, {ROWS} rows at context {CONTEXT}, greedy: "
            f"device time of a whole decode step in one graph, with adapters of rank {LORA.rank} on all seven "
            f"projections, and without, paired, in turns. Captured for {LORA.cases} active adapters; "
            f"{'; '.join(captures)}. The bar is {BAR}, for each operation set.",
            "unit": "ms",
            "machine": machine(),
            "versions": versions("torch", "triton", "cuda-bindings"),
            "commit": commit(),
            "columns": ["operations", "rows have", "median", "p10", "p90", "without", "with / without"],
            "rows": rows,
            "launches": {"unit": "us a projection", "columns": COLUMNS, "rows": launches},
            "graphs": graphs,
            "samples": samples,
        }
    )
    print("; ".join(wrong) or f"within {BAR}")
    return 1 if wrong else 0


def _captured(batch: Batch) -> str:
    """What its graphs took, in words."""
    families = make_ledger([Captured(batch.report)]).families()
    return ", ".join(
        f"{name}: {one.graphs} graphs, {(one.pool_bytes + one.driver_bytes) / 2**20:.0f} MiB, {one.seconds:.2f} s"
        for name, one in families.items()
    )


if __name__ == "__main__":
    sys.exit(main())
