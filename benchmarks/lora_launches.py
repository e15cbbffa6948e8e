"""Where adapters' time goes: each launch of each projection, alone and behind the projection that it adds to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import device_ms

from stepgraph.measure.graph import CallGraph
from stepgraph.ops.lora import LayerLora, LoraPair, LoraRows
from stepgraph.ops.lora.triton_lora import TritonLora
from stepgraph.ops.operations import LayerWeights

COLUMNS = [
    "projection",
    "rows have",
    "projection alone",
    "+ shrink",
    "+ expand",
    "shrink alone",
    "expand alone",
    "+ both, without overlap",
    "+ both, shrink beside the projection",
]
PROJECTIONS = ("qkv", "attention_out", "gate_up", "down")
REPLAYS = 10


def launch_times(
    layers: Sequence[LayerWeights], adapters: Sequence[LayerLora], batches: dict[str, list[int]]
) -> list[list[Any]]:
    """Rows of COLUMNS, in us a projection: all layers' in one graph, each with its own weights.

    batches: name to the adapter of each row, -1 for none.

    What a launch adds behind the projection is what a step pays. Alone, one adapter's weights come from the cache. The
    last columns are for comparison: both launches without programmatic launch, and the first one on a stream beside.
    """
    return [
        [name, rows, *_times([getattr(one, name) for one in layers], [getattr(one, name) for one in adapters], mine)]
        for name in PROJECTIONS
        for rows, mine in batches.items()
    ]


def _times(weights: list[torch.Tensor], pairs: list[LoraPair], mine: list[int]) -> list[float]:
    index = torch.tensor(mine, dtype=torch.int32, device="cuda")
    rows = LoraRows(index, index.clamp_min(0), max(mine) + 1)
    lora, plain = TritonLora(rows), TritonLora(rows, overlap=False)
    x = torch.randn(len(mine), weights[0].shape[1], dtype=weights[0].dtype, device="cuda")
    out, shrunk = F.linear(x, weights[0]), lora.shrink(pairs[0], x)
    side = torch.cuda.Stream()

    def with_shrink(weight: torch.Tensor, pair: LoraPair) -> None:
        F.linear(x, weight)
        lora.shrink(pair, x)

    def beside(weight: torch.Tensor, pair: LoraPair) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sums = plain.shrink(pair, x)
        added_to = F.linear(x, weight)
        torch.cuda.current_stream().wait_stream(side)
        plain.expand(pair, sums, added_to)

    def us(way: Callable[[torch.Tensor, LoraPair], object]) -> float:
        def step() -> None:
            for weight, pair in zip(weights, pairs, strict=True):
                way(weight, pair)

        return _graph_us(step) / len(weights)

    bare = us(lambda weight, _: F.linear(x, weight))
    first = us(with_shrink)
    both = us(lambda weight, pair: lora(pair, x, F.linear(x, weight)))
    return [
        bare,
        first - bare,
        both - first,
        us(lambda _, pair: lora.shrink(pair, x)),
        us(lambda _, pair: lora.expand(pair, shrunk, out)),
        us(lambda weight, pair: plain(pair, x, F.linear(x, weight))) - bare,
        us(beside) - bare,
    ]


def _graph_us(step: Callable[[], object]) -> float:
    """Of a graph of the step: the median of some replays."""
    start = torch.zeros(1, device="cuda")

    def behind_a_kernel() -> None:
        start.add_(1)  # that the first one can wait for
        step()

    return statistics.median(device_ms(CallGraph(behind_a_kernel).replay, REPLAYS)) * 1e3
