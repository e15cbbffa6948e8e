"""Where the time of a fused step goes: parts left out, other tiles, and every projection by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import device_ms

from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.projections import Projections
from stepgraph.measure.tune import tile_name
from stepgraph.ops.attention import cuda_decode
from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import OPERATIONS, Choice, OneTile, Tile, Tiles, by_triton, load_tiles
from stepgraph.runtime import BatchDescriptor

FEW = [1, 2, 4, 8, 16]
SAME = [  # tiles that all projections of a step may have
    Tile(16, 64, 8, 3, "cuda"),
    Tile(16, 64, 8, 4, "cuda"),
    Tile(32, 64, 8, 3, "cuda"),
    Tile(16, 64, 4, 6, "cuda"),
    Tile(4, 1024, 4),
    Tile(8, 1024, 4),
]


class ByTriton(Tiles):
    """What Triton takes by rule, wherever."""

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        return Choice(operation, out, width, rows, by_triton(out, width, rows), "by rule")


class Deep(Tiles):
    """As chosen, but an output projection that holds many of its weights before attention has ended."""

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        if operation == "attention_out":
            return Choice(operation, out, width, rows, Tile(16, 64, 8, 6, "cuda"), "deep")
        return super().choose(operation, out, width, rows)


def logits(decode: DecodeRows, attention: bool = True) -> torch.Tensor:
    """Of the rows that are staged, without sampling; without attention, of whatever its output would lie in."""
    model, core = decode.core.model, decode.core
    views = decode.buffers.views(BatchDescriptor.decode(decode._live))
    tables, lengths = views["block_tables"], views["seq_lens"]

    def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        if attention:
            core.attention.decode(q, kv, tables, lengths, out)

    return model.logits(model.forward(views["tokens"], views["positions"], tables, core.kv_cache, attend))


def graphed(call: Callable[[], object]) -> float:
    """ms of a graph of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return statistics.median(device_ms(graph.replay, 20))


def where_time_goes(decode: DecodeRows) -> list[list[Any]]:
    """Of a fused step; differences are what a part adds, not what it takes by itself."""
    decode.rewind()
    whole = graphed(lambda: logits(decode))
    rows = [
        ["layers and LM head, without sampling", whole],
        ["the same without attention", graphed(lambda: logits(decode, attention=False))],
    ]
    model = decode.core.model
    chosen = model.operations
    for name, tiles in (("Triton by rule", ByTriton()), *((tile_name(tile), OneTile(tile)) for tile in SAME)):
        model.operations = FusedOperations(chosen._shape, tiles)
        rows.append([f"the same, all projections {name}", graphed(lambda: logits(decode))])
    deep = FusedOperations(chosen._shape, Deep(chosen._tiles.choices.values()))
    kept = cuda_decode._TRIGGER
    starts = (("as it does", kept), ("at once", -1), ("after its wait", 1 << 20), ("at its end", 0))
    for name, blocks in starts:
        cuda_decode._TRIGGER = blocks
        cuda_decode._kernel.cache_clear()
        for which, made in (("as chosen", chosen), ("with a deep output projection", deep)):
            model.operations = made
            told = f"the same, {which}, attention lets the next kernel start {name}"
            rows.append([told, graphed(lambda: logits(decode))])
    cuda_decode._TRIGGER, model.operations = kept, chosen
    cuda_decode._kernel.cache_clear()
    return rows


def by_operation(shape: str, limit: float) -> Iterator[list[Any]]:
    """Every projection by itself, as it is chosen and by the library. limit: bytes per second."""
    tiles = load_tiles(torch.cuda.get_device_name())
    projections = Projections(SHAPES[shape], torch.device("cuda"), torch.bfloat16)
    for operation in OPERATIONS:
        for rows in FEW:
            tile = tiles.choose(operation, *projections.size(operation), rows).tile
            took = []
            for one in (tile, None):
                graph, launches = projections.graph(operation, rows, one)
                took.append(statistics.median(device_ms(graph.replay, 20)) * 1e3 / launches)
            speed = projections.weight_bytes(operation) / took[0] / 1e6
            row = [shape, operation, rows, tile_name(tile), *took, speed, speed * 1e12 / limit * 100]
            print(*row, flush=True)
            yield row
