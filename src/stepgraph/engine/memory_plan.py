"""What an engine will take, predicted from its configuration and a device's profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.graphs import largest_batch
from stepgraph.engine.kv_blocks import BLOCK_SIZE, block_bytes
from stepgraph.engine.memory_rows import model_features, planned_rows, step_features
from stepgraph.engine.scheduler import most_tokens
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.memory.ledger import Row
from stepgraph.runtime.memory.profile import DeviceProfile


@dataclass(frozen=True)
class MemoryPlan:
    """rows: what is taken before the KV cache. budget: bytes that all may take. block_bytes: of a KV block."""

    device: str
    rows: tuple[Row, ...]
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
            "taken_bytes": self.taken,
            "budget_bytes": self.budget,
            "block_bytes": self.block_bytes,
            "kv_blocks": self.kv_blocks,
            "kv_tokens": self.kv_blocks * BLOCK_SIZE,
        }


def predict_graphs(
    config: ModelConfig, dtype: torch.dtype, keys: Iterable[BatchDescriptor], max_requests: int, profile: DeviceProfile
) -> tuple[int, int]:
    """Bytes of the pool and of the driver that the graphs of these keys will take.

    keys: in the order of their capture, the largest of each kind first. max_requests: rows of the buffers.
    """
    kinds: dict[str, list[BatchDescriptor]] = {}
    for key in keys:
        kinds.setdefault("prefill" if key.is_relaxed else "decode", []).append(key)
    largest = {}
    for kind, members in kinds.items():
        tokens = members[0].num_tokens
        rows = members[0].num_reqs or min(tokens, max_requests)
        largest[kind] = step_features(config, dtype, rows=rows, tokens=tokens)
    graphs = {kind: len(members) for kind, members in kinds.items()}
    return profile.pool_bytes(largest, graphs), profile.driver_bytes(model_features(config), graphs)


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
) -> MemoryPlan:
    """The plan of an engine with these settings, as `LLM` takes them. memory_fraction: of the device's memory."""
    requests = largest_batch(graphs, max_num_seqs)
    tokens = max(requests, most_tokens(chunk_tokens, max_num_seqs))
    keys = capture_keys(graphs, max_requests=requests, max_tokens=tokens)
    pool, driver = predict_graphs(config, dtype, keys, requests, profile)
    rows = [
        Row("context, kernels and libraries", profile.driver_before + profile.loaded),
        *planned_rows(
            config, dtype, max_requests=requests, max_tokens=tokens, max_len=max_model_len, penalties=penalties
        ),
        Row("graphs: pool", pool),
        Row("graphs: driver", driver),
    ]
    budget = int(profile.total_bytes * memory_fraction)
    return MemoryPlan(profile.device, tuple(rows), budget, block_bytes(config, dtype))
