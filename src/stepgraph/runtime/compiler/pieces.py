"""What a traced step consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node


@dataclass(frozen=True)
class Ref:
    """A tensor that the step makes: by number, in the order in which it is first needed outside its piece."""

    number: int


@dataclass(frozen=True)
class Span:
    """The `length` elements of a storage from where a tensor that the step makes begins."""

    of: Ref
    length: int

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided((self.length,), (1,))


@dataclass(frozen=True)
class Layout:
    """What a piece knows of an input. size, stride: in elements; start, stop: bytes of its storage; residue: its
    address modulo 64."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: int
    stop: int
    residue: int


@dataclass
class TracedPiece:
    """Operators between two breaks.

    inputs: a Ref, or a tensor from outside the step, by placeholder. storages: of the inputs; the same number, the
    same storage. written: those among them that the piece writes. outputs: nodes that are needed outside, with the
    Ref that each becomes.
    """

    graph: Graph = field(default_factory=Graph)
    inputs: list[Ref | Span | torch.Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    outputs: list[tuple[Node, Ref]] = field(default_factory=list)
    work: bool = False


@dataclass(frozen=True)
class TracedBreak:
    """A call of a break. args, kwargs: with Refs for what the step made. results: by leaf of what it returns, the Ref
    that it becomes, if that is needed."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: list[Ref | None]


@dataclass(frozen=True)
class Trace:
    """parts: in the order in which they run. result: what the step returns, with Refs for what it made."""

    parts: list[TracedPiece | TracedBreak]
    result: Any
