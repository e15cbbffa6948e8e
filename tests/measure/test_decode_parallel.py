"""The measured decode step on several ranks, with weights made where they are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comm.ranks_in_processes import results, run_ranks

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.group import Group
from stepgraph.engine.parallel import TensorParallel
from stepgraph.engine.random_model import SHAPES, random_model
from stepgraph.measure.decode import DecodeRows
from stepgraph.runtime import GraphConfig, Ladder

CONFIG = replace(
    SHAPES["llama-3-8b"], hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=300,
)  # fmt: skip


def decoded(group: Group) -> dict[str, Any]:
    parallel = TensorParallel(group, AllReduce(group, why_library="a CPU"), candidates=0)
    model = random_model(CONFIG, device="cpu", dtype=torch.float32, max_positions=64, parallel=parallel)
    graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2]))
    decoder = DecodeRows(model, graphs, rows=2, context=20, parallel=parallel)
    decoder.core.capture()
    decoder.stage(2)
    eager = decoder.another(GraphConfig.preset("NONE"))
    tokens = []
    for runner in (decoder.runner, eager):
        decoder.rewind()
        decoder.buffers["tokens"][:2] = 1
        tokens.append(runner(num_requests=2).tokens.tolist())
    nodes = [node.region for node in decoder.runner.graph_nodes(2)]
    decoder.core.release()
    return {
        "tokens": tokens,
        "head": tuple(model.lm_head.shape),
        "heads": model.config.num_heads,
        "frozen": [one["kind"] for one in parallel.frozen()["2 requests"]],
        "gathers": "sampling/gather" in nodes,
    }


def test_a_rank_decodes_its_part_of_a_random_model(tmp_path: Path) -> None:
    first, second = results(run_ranks(2, tmp_path, decoded))
    assert first["tokens"][0] == first["tokens"][1] == second["tokens"][0] == second["tokens"][1]
    for found in (first, second):
        assert found["head"] == (150, 64) and found["heads"] == 2
        assert found["frozen"] == ["all_reduce"] * 4 + ["gather"]
        assert found["gathers"]
