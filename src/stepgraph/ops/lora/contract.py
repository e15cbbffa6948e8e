"""Low-rank adapters as operation sets see them: stacked weights, which row has which, and what adds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from stepgraph.ops.norm import Norm
from stepgraph.runtime.regions import region


class Adapt(Protocol):
    """What each row's adapter adds to one projection."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, norm: Norm | None = None, /) -> None:
        """x: [rows, in], contiguous. out: [rows, out], the projection of x, added to in place. norm: both are of x
        normed by it."""


@dataclass(frozen=True)
class LoraPair:
    """The adapters of one projection, in slots; an empty slot is all zeros. Low ranks are filled up with zeros.

    Projections that are joined into one keep their own A, each `rank` rows; the scale is part of B.

    a: [slots, parts x rank, in], b: [slots, out, rank], in the model's dtype.
    ends: where the output columns of each part end, up to three.
    """

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True)
class LayerLora:
    """The adapters of a layer's four projections; see `LayerWeights`."""

    qkv: LoraPair
    attention_out: LoraPair
    gate_up: LoraPair
    down: LoraPair


LAYER_LAUNCHES = 8
"""What the kernels of adapters launch in a layer on a GPU, whatever the number of adapters: two a projection."""


@dataclass(frozen=True)
class LoraRows:
    """Which adapter each row of a step has.

    index: int32 [rows]; its number among the step's active adapters, from 0; -1 for none.
    slot: int32 [rows]; where its weights lie. Any slot that there is where index is -1.
    active: numbers that there may be: fixed where a step is captured, while the tensors are read at each replay. A row
        with a number from here on gets nothing.
    """

    index: torch.Tensor
    slot: torch.Tensor
    active: int


@dataclass(frozen=True)
class LayerAdapters:
    """One layer's projections, for the rows of one step. None: nothing is added."""

    qkv: Adapt | None = None
    attention_out: Adapt | None = None
    gate_up: Adapt | None = None
    down: Adapt | None = None


NO_ADAPTERS = LayerAdapters()


def bind_layers(
    apply: Callable[[LoraPair, torch.Tensor, torch.Tensor, Norm | None], None], layers: Sequence[LayerLora]
) -> list[LayerAdapters]:
    """apply: (pair, x, out, norm), of the rows of a step. Its launches have a region of their own."""

    def named(pair: LoraPair, x: torch.Tensor, out: torch.Tensor, norm: Norm | None = None, /) -> None:
        with region("adapters"):
            apply(pair, x, out, norm)

    four = [(layer.qkv, layer.attention_out, layer.gate_up, layer.down) for layer in layers]
    return [LayerAdapters(*(partial(named, pair) for pair in pairs)) for pairs in four]
