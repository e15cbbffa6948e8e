"""What a decode step has to read and to compute, and how long that takes at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.tensors import expected_tensors

EMBEDDING = "model.embed_tokens.weight"

BYTES_DEFINITION = (
    "Every weight once, but of the input embedding only what the LM head shares with it; keys and values of every "
    "row's context once."
)
FLOPS_DEFINITION = "Two for each element of a weight matrix and row; four for each query element and token of context."


@dataclass(frozen=True)
class Part:
    """Of a step's work. nbytes: to be read at least. flops: multiplications and additions."""

    name: str
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Limits:
    """Of a device. read: bytes per second. compute: floating-point operations per second."""

    read: float
    compute: float


@dataclass(frozen=True)
class Floor:
    """µs that the work takes at least.

    read, compute: all of its bytes, and all of its arithmetic, at the limits. total: of each part whichever is longer,
    since parts follow each other; `bound_by_compute` of it is that of parts whose arithmetic is longer.
    """

    read: float
    compute: float
    total: float
    bound_by_compute: float


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the weights that every decode step reads. itemsize: bytes of an element."""
    return itemsize * sum(math.prod(shape) for shape in _read(config))


def decode_work(config: ModelConfig, *, rows: int, context: int, itemsize: int) -> tuple[Part, ...]:
    """Of one decode step. context: tokens that each row attends to, its own included."""
    if config.window is not None:
        context = min(context, config.window)
    matrices = sum(math.prod(shape) for shape in _read(config) if len(shape) == 2)
    kv_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    query = config.num_layers * config.num_heads * config.head_dim
    return (
        Part("weights", weight_bytes(config, itemsize), 2 * rows * matrices),
        Part("attention", rows * context * kv_token, 4 * rows * context * query),
    )


def floor(parts: Sequence[Part], limits: Limits) -> Floor:
    reads = [part.nbytes / limits.read * 1e6 for part in parts]
    computes = [part.flops / limits.compute * 1e6 for part in parts]
    longer = [max(read, compute) for read, compute in zip(reads, computes, strict=True)]
    by_compute = sum(compute for read, compute in zip(reads, computes, strict=True) if compute > read)
    return Floor(sum(reads), sum(computes), sum(longer), by_compute)


def _read(config: ModelConfig) -> list[tuple[int, ...]]:
    tensors = expected_tensors(config)
    return [shape for name, shape in tensors.items() if name != EMBEDDING or config.tie_word_embeddings]
