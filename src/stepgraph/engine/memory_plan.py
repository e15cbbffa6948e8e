"""What an engine will take, predicted from its configuration and a device's profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.budget import MARGIN
from stepgraph.engine.config import ModelConfig
from stepgraph.engine.graphs import largest_batch
from stepgraph.engine.kv_blocks import BLOCK_SIZE, block_bytes
from stepgraph.engine.lora import LoraConfig
from stepgraph.engine.memory_rows import model_features, planned_rows, step_features
from stepgraph.engine.scheduler import most_tokens
from stepgraph.ops.attention import AttentionShape
from stepgraph.ops.attention.select import planned_workspace
from stepgraph.ops.lora import LAYER_LAUNCHES
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.memory.estimate import LEAST_MARGINAL, Features
from stepgraph.runtime.memory.ledger import Row, family
from stepgraph.runtime.memory.profile import DeviceProfile


@dataclass(frozen=True)
class MemoryPlan:
    """rows: what is taken before the KV cache. graphs: how many of each family are in it.
    budget: bytes that all may take. block_bytes: of a KV block."""

    device: str
    rows: tuple[Row, ...]
    graphs: Mapping[str, int]
    budget: int
    block_bytes: int

    @property
    def taken(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def kv_blocks(self) -> int:
        """What is left, in blocks; 0 where nothing is."""
        return max(self.budget - self.taken, 0) // self.block_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "rows": [{"name": row.name, "bytes": row.nbytes} for row in self.rows],
            "graphs": dict(self.graphs),
            "taken_bytes": self.taken,
            "budget_bytes": self.budget,
            "block_bytes": self.block_bytes,
            "kv_blocks": self.kv_blocks,
            "kv_tokens": self.kv_blocks * BLOCK_SIZE,
        }


def predict_graphs(
    config: ModelConfig,
    dtype: torch.dtype,
    keys: Iterable[BatchDescriptor],
    max_requests: int,
    profile: DeviceProfile | None,
) -> tuple[int, int]:
    """Bytes of the pool and of the driver that the graphs of these keys will take. Of adapters the launches count,
    but nothing for what these hold in the pool meanwhile.

    keys: in the order of their capture, the largest of each kind first. max_requests: rows of the buffers.
    profile: of the device; without one, by rule: the largest step, and 1 MiB a graph.
    """
    kinds: dict[str, list[BatchDescriptor]] = {}
    with_adapters = 0
    for key in keys:
        with_adapters += key.num_loras > 0
        kinds.setdefault("prefill" if key.is_relaxed else "decode", []).append(key)
    largest = {}
    for kind, members in kinds.items():
        tokens = members[0].num_tokens
        rows = members[0].num_reqs or min(tokens, max_requests)
        largest[kind] = step_features(config, dtype, rows=rows, tokens=tokens)
    graphs = {kind: len(members) for kind, members in kinds.items()}
    if profile is None:
        pool = max((_of_a_step(features) for features in largest.values()), default=0)
        return pool, LEAST_MARGINAL * sum(graphs.values())
    launches = with_adapters * config.num_layers * LAYER_LAUNCHES
    return profile.pool_bytes(largest, graphs), profile.driver_bytes(model_features(config), graphs, launches)


def predict_eager(
    config: ModelConfig, dtype: torch.dtype, *, max_requests: int, max_tokens: int, profile: DeviceProfile | None
) -> int:
    """Bytes that the largest eager step holds. Its memory is torch's, beside that of the graphs."""
    features = step_features(config, dtype, rows=max_requests, tokens=max_tokens)
    return _of_a_step(features) if profile is None else round(profile.pool["prefill"]({**features, "graphs": 0}))


def _of_a_step(features: Features) -> int:
    return int(features["logits"] + features["activations"])


def plan_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    graphs: GraphConfig,
    profile: DeviceProfile,
    *,
    max_num_seqs: int,
    max_model_len: int,
    chunk_tokens: int,
    memory_fraction: float,
    penalties: bool = True,
    lora: LoraConfig | None = None,
) -> MemoryPlan:
    """The plan of an engine with these settings, as `LLM` takes them. memory_fraction: of the device's memory.

    graphs: with the cases of `lora`, each of which has graphs of its own. What compiling or recording in segments
        changes is not in it: a profile is of whole graphs.
    """
    requests = largest_batch(graphs, max_num_seqs)
    tokens = max(requests, most_tokens(chunk_tokens, max_num_seqs))
    keys = capture_keys(graphs, max_requests=requests, max_tokens=tokens)
    pool, driver = predict_graphs(config, dtype, keys, requests, profile)
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE, window=config.window)
    rows = [
        Row("context, kernels and libraries", profile.driver_before + profile.loaded + profile.workspaces),
        *planned_rows(
            config,
            dtype,
            max_requests=requests,
            max_tokens=tokens,
            max_len=max_model_len,
            penalties=penalties,
            lora=lora,
        ),
        Row("attention workspace", planned_workspace(shape, profile.num_sms, requests, max_model_len)),
        Row("shared outputs", requests * torch.int64.itemsize),
        Row("graphs: pool", pool),
        Row("graphs: driver", driver),
        Row(
            "eager steps, at most",
            predict_eager(config, dtype, max_requests=requests, max_tokens=tokens, profile=profile),
        ),
        Row("margin", MARGIN),
    ]
    budget = int(profile.total_bytes * memory_fraction)
    return MemoryPlan(profile.device, tuple(rows), Counter(map(family, keys)), budget, block_bytes(config, dtype))
