"""What the engine has in memory, by name: of one that runs, and of one that is only planned."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.lora import LoraConfig
from stepgraph.engine.lora.slots import lora_shapes
from stepgraph.engine.step import step_slots
from stepgraph.engine.tensors import expected_tensors
from stepgraph.runtime.layout import pack
from stepgraph.runtime.memory.estimate import Features
from stepgraph.runtime.memory.ledger import Row, family

if TYPE_CHECKING:
    from stepgraph.engine.core import EngineCore

WEIGHTS = "weights and rotary tables"
"""The row that is taken first."""
COUNTS = "seen"
"""The slot with what rows have seen, for penalties."""


def engine_rows(core: EngineCore) -> list[Row]:
    """Everything of a running engine that has a name, but for its graphs. Bytes of storages, each counted once."""
    counted: set[int] = set()
    slots = core.buffers
    counts = slots[COUNTS].nbytes if COUNTS in slots.slots else 0
    rows = [
        Row(WEIGHTS, _storages(_tensors(core.model), counted)),
        Row("adapters", _storages(_tensors(core.lora), counted)),
        _cache(core),
        Row("static buffers", slots.slab.nbytes - counts),
        Row("penalty counts", counts),
        Row("attention workspace", _storages(_tensors(core.attention), counted)),
        Row("shared outputs", core.runner.output_bytes),
        Row("workspaces of libraries", core.eager_left.kept_bytes + _kept_by_warm_ups(core)),
        Row("torch: its cache", core.runner.pool.platform.cached_bytes()),
        _later("driver: loaded by eager steps", core.eager_left.loaded_bytes),
    ]
    keys = core.runner.capture_report.graphs
    if keys:
        most = max(rows for rows in (key.num_reqs or 0 for key in keys))
        logits = most * core.model.config.vocab_size * core.model.dtype.itemsize
        first = next(iter(keys))  # whose memory the others share
        rows.append(Row("logits of the largest decode step", logits, of=f"{family(first)} graphs: pool"))
    return [row for row in rows if row.nbytes]


def planned_rows(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_requests: int,
    max_tokens: int,
    max_len: int,
    penalties: bool,
    lora: LoraConfig | None = None,
) -> list[Row]:
    """The same of an engine that is not there: what follows from its configuration alone."""
    weights = sum(math.prod(shape) for shape in expected_tensors(config).values()) * dtype.itemsize
    tables = 2 * max_len * config.head_dim * dtype.itemsize
    adapters = 0 if lora is None else sum(map(math.prod, lora_shapes(config, lora).values())) * dtype.itemsize
    vocab = config.vocab_size if penalties else None
    slots = {slot.name: slot for slot in step_slots(blocks_for(max_len), 0, vocab, adapters=lora is not None)}
    spans, end = pack(slots.values(), {"request": max_requests, "token": max_tokens})
    start, stop = spans.get(COUNTS, (0, 0))
    rows = [
        Row(WEIGHTS, weights + tables),
        Row("adapters", adapters),
        Row("static buffers", end - (stop - start)),
        Row("penalty counts", stop - start),
    ]
    return [row for row in rows if row.nbytes]


def step_features(config: ModelConfig, dtype: torch.dtype, *, rows: int, tokens: int) -> dict[str, float]:
    """What the memory of one step grows with. rows: whose logits are computed. tokens: that pass the layers."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    widths = 3 * config.intermediate_size + 4 * config.hidden_size + heads * config.head_dim
    return {
        "one": 1.0,
        "logits": float(rows * config.vocab_size * dtype.itemsize),
        "activations": float(tokens * widths * dtype.itemsize),
    }


def model_features(config: ModelConfig) -> Features:
    """What the nodes of a graph grow with."""
    return {"one": 1.0, "layers": float(config.num_layers)}


def _cache(core: EngineCore) -> Row:
    memory = getattr(core, "kv_memory", None)
    if memory is None or not memory.resizable:
        return Row("KV cache", core.kv_cache.nbytes)
    return Row("KV cache", memory.nbytes, in_torch=False, later=memory.nbytes - core.kv_bytes_at_capture)


def _later(name: str, nbytes: int) -> Row:
    """Taken outside torch after the capture."""
    return Row(name, nbytes, in_torch=False, later=nbytes)


def _kept_by_warm_ups(core: EngineCore) -> int:
    """Without the shared outputs, which the first of them makes."""
    graphs = core.runner.capture_report.graphs.values()
    kept = sum(graph.cost.kept_bytes for graph in graphs)
    return kept - core.runner.output_bytes if kept else 0


def _tensors(owner: object) -> Iterable[torch.Tensor]:
    """Every tensor that an object holds, however deep in lists, mappings and objects of this package."""
    to_visit, visited = [owner], set()
    while to_visit:
        value = to_visit.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            to_visit.extend(value)
        elif isinstance(value, dict):
            to_visit.extend(value.values())
        elif type(value).__module__.startswith("stepgraph."):
            to_visit.extend(getattr(value, "__dict__", {}).values())


def _storages(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total
