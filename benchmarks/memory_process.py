"""A model on the device, its engine, and what a capture of it takes."""

from __future__ import annotations

import gc
from typing import Any

import torch

from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import WARMUPS
from stepgraph.engine.memory_rows import engine_rows, model_features, step_features
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.random_model import random_model
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import get_backend
from stepgraph.runtime import GraphConfig, Ladder
from stepgraph.runtime.memory.estimate import TwoSamples, two_sample_estimate
from stepgraph.runtime.memory.ledger import Captured, make_ledger
from stepgraph.runtime.platforms import Platform, platform_for

MAX_LEN, KV_BLOCKS, CHUNK = 4096, 600, 512


def bytes_used(platform: Platform) -> int:
    """Bytes that the device has given away, once nothing unused is held back."""
    gc.collect()
    platform.give_back()
    memory = platform.memory()
    assert memory is not None
    return memory.total - memory.free


class Process:
    """A model on the device, and the memory as it was before."""

    def __init__(self, shape: Any) -> None:
        self.platform = platform_for("cuda")
        self.start = self.platform.memory()
        self.model: DecoderModel = random_model(shape, device="cuda", dtype=torch.bfloat16, max_positions=MAX_LEN)

    def core(self, mode: str, ladder: Ladder, chunk: int = CHUNK, rows: int | None = None) -> EngineCore:
        rows = rows or ladder.max_size
        tokens = most_tokens(chunk, rows)
        prefill = Ladder.sglang_prefill(tokens)
        graphs = GraphConfig.preset(mode, ladder=ladder, prefill_ladder=prefill, warmups=WARMUPS)
        attention = get_backend(
            None, self.model.device, attention_shape(self.model.config), max_rows=rows, max_len=MAX_LEN
        )
        return EngineCore(
            self.model,
            attention,
            graphs,
            max_num_seqs=rows,
            max_model_len=MAX_LEN,
            num_blocks=KV_BLOCKS,
            chunk_tokens=chunk,
        )

    def used(self) -> int:
        return bytes_used(self.platform)

    def session(self, core: EngineCore) -> dict[str, Any]:
        """Capture, and everything that the ledger and the estimates say of it. The graphs stay."""
        report = core.capture()
        ledger = make_ledger([Captured(report)], engine_rows(core), self.platform.memory(), self.start)
        config, dtype = core.model.config, core.model.dtype
        kinds: dict[str, Any] = {}
        for key, graph in report.graphs.items():
            kind = kinds.setdefault("prefill" if key.is_relaxed else "decode", {"taken": [], "nodes": []})
            if not kind["taken"]:
                rows = key.num_reqs or min(key.num_tokens, core.buffers.max_requests)
                kind["features"] = step_features(config, dtype, rows=rows, tokens=key.num_tokens)
            kind["taken"].append([graph.cost.pool_bytes, graph.cost.driver_bytes])
            kind["nodes"].append(sum(graph.cost.nodes.values()))
        modes = [[pool + driver for pool, driver in kind["taken"]] for kind in kinds.values()]
        before = report.before
        return {
            "seconds": report.seconds,
            "dropped": len(report.dropped),
            "kinds": kinds,
            "model": model_features(config),
            "outside_before": before.outside if before else 0,
            "total": before.total if before else 0,
            "two_samples": two_sample_estimate([TwoSamples(m[0], m[1], len(m)) for m in modes]),
            "ledger": ledger.as_dict(),
            "attention": core.attention.name,
            "operations": core.model.operations.name,
        }
