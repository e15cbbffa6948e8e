"""Where the time of a fused step goes: parts left out, other tiles, and every projection by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import device_ms

from stepgraph.engine.model import attention_shape
from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.graph import CallGraph
from stepgraph.measure.projections import Projections
from stepgraph.measure.tune import tile_name
from stepgraph.ops.attention import get_backend
from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Choice, OneTile, Tile, Tiles, by_triton, load_tiles
from stepgraph.ops.reference_set import ReferenceOperations
from stepgraph.runtime import BatchDescriptor

SAME = [  # tiles that all projections of a step may have
    Tile(16, 64, 8, 6, "cuda"),
    Tile(16, 64, 8, 3, "cuda"),
    Tile(32, 64, 8, 3, "cuda"),
    Tile(4, 1024, 4),
    Tile(8, 1024, 4),
]


class ByTriton(Tiles):
    """What Triton takes by rule, wherever."""

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        return Choice(operation, out, width, rows, by_triton(out, width, rows), "by rule")


def no_attention(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
    """What would be its output is whatever lies there."""


def float32_logits(decode: DecodeRows) -> torch.Tensor:
    """What the step's logits are without rounding in between: layer by layer by the `reference` operations, in float32.
    The cache is left as it was."""
    core, model = decode.core, decode.core.model
    shape = attention_shape(model.config)
    operations = ReferenceOperations(_float32(model.operations._shape))  # type: ignore[attr-defined]
    attention = get_backend("reference", model.device, shape, max_rows=1, max_len=decode.context)
    views = decode.buffers.views(BatchDescriptor.decode(decode._live))
    tables, lengths = views["block_tables"], views["seq_lens"]

    def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        attention.decode(q, kv, tables, lengths, out)

    places = operations.places(views["positions"], tables, core.kv_cache.shape[3])
    hidden = operations.embed(views["tokens"], model.embedding.float())
    for index, layer in enumerate(model.layers):
        hidden = operations.layer(hidden, _float32(layer), places, core.kv_cache[:, index].float(), attend)
    return operations.head(hidden, model.final_norm.float(), model.lm_head.float())


def _float32(parts: Any) -> Any:
    """Weights, or a shape, with all numbers in float32."""
    numbers = {name: one.float() for name, one in vars(parts).items() if isinstance(one, torch.Tensor)}
    return replace(parts, **numbers)


def graphed(call: Callable[[], object]) -> float:
    """ms of a graph of it."""
    return statistics.median(device_ms(CallGraph(call).replay, 20))


def where_time_goes(decode: DecodeRows) -> list[list[Any]]:
    """Of a fused step; differences are what a part adds, not what it takes by itself."""
    decode.rewind()
    rows = [
        ["layers and LM head, without sampling", graphed(decode.logits)],
        ["the same without attention", graphed(lambda: decode.logits(no_attention))],
    ]
    model = decode.core.model
    chosen = model.operations
    assert isinstance(chosen, FusedOperations)
    for name, tiles in (("Triton by rule", ByTriton()), *((tile_name(tile), OneTile(tile)) for tile in SAME)):
        model.operations = chosen.with_tiles(tiles)
        rows.append([f"the same, all projections {name}", graphed(decode.logits)])
    model.operations = chosen
    return rows


def by_operation(shape: str, limit: float) -> Iterator[list[Any]]:
    """Every projection by itself, as it is chosen and by the library. limit: bytes per second."""
    tiles = load_tiles(torch.cuda.get_device_name())
    projections = Projections(SHAPES[shape], torch.device("cuda"), torch.bfloat16)
    for operation in OPERATIONS:
        for rows in ROWS:
            tile = tiles.choose(operation, *projections.size(operation), rows).tile
            took = []
            for one in (tile, None):
                graph, launches = projections.graph(operation, rows, one)
                took.append(statistics.median(device_ms(graph.replay, 20)) * 1e3 / launches)
            speed = projections.weight_bytes(operation) / took[0] / 1e6
            row = [shape, operation, rows, tile_name(tile), *took, speed, speed * 1e12 / limit * 100]
            print(*row, flush=True)
            yield row
