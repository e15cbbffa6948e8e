"""What a run computes, operator by operator: of an eager step, and of a recording that is replayed piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgraph.runtime.breakable import Break, BreakableRecording
from stepgraph.runtime.platforms import Recording
from stepgraph.runtime.platforms.source_line import calling_line
from stepgraph.runtime.platforms.tape.platform import TapeRecording
from stepgraph.runtime.regions import RegionLog, logging_regions

Lens = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Which part of a tensor counts: the real rows, or those of the state that lie in its memory."""

_KEPT_ELEMENTS = 1 << 22  # values of larger results are not kept, only their digests
_CHUNK = 1 << 24  # elements of a digest at a time
_ODD = -0x61C8864680B583EB  # 2^64 / golden ratio
_UNFILLED = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True)
class Look:
    """One tensor at one moment. digest: an int64 on its device that tells other bits apart."""

    shape: tuple[int, ...]
    digest: torch.Tensor
    value: torch.Tensor | None

    @classmethod
    def at(cls, tensor: torch.Tensor, *, keep: bool) -> Look:
        value = tensor.detach().cpu().clone() if keep and tensor.numel() <= _KEPT_ELEMENTS else None
        return cls(tuple(tensor.shape), digest(tensor), value)


@dataclass(frozen=True)
class Detail:
    """An input or a result in words, and a tensor's digest."""

    text: str
    digest: int | None


@dataclass(frozen=True)
class Operation:
    """One operator that ran: its name, where it was called, and what it returned or wrote."""

    name: str
    line: str
    looks: tuple[Look, ...]
    inputs: tuple[Detail, ...] = ()
    results: tuple[Detail, ...] = ()
    region: str = ""


class Observer(TorchDispatchMode):
    """Notes every operator that makes or changes a tensor.

    keep: keep values as well, for comparing within a tolerance. detail_at: the operator whose inputs and results are
    also described; tails: with their padded rows.
    """

    def __init__(self, lens: Lens, *, keep: bool = False, detail_at: int | None = None, tails: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._lens, self._keep, self._detail_at, self._tails = lens, keep, detail_at, tails

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        wanted = len(self.operations) == self._detail_at
        inputs = tuple(self._detail(leaf) for leaf in tree_leaves((args, kwargs))) if wanted else ()
        result = func(*args, **kwargs)
        if str(func).startswith(_UNFILLED):
            result.zero_()  # whatever lay there would differ from run to run
            return result
        seen = _made_or_written(func, args, kwargs, result)
        if seen:
            looks = tuple(Look.at(part, keep=self._keep) for tensor in seen for part in self._lens(tensor))
            results = tuple(self._detail(tensor) for tensor in seen) if wanted else ()
            self.operations.append(Operation(str(func), calling_line(), looks, inputs, results))
        return result

    def _detail(self, value: Any) -> Detail:
        if not isinstance(value, torch.Tensor):
            return Detail(repr(value), None)
        part = self._lens(value)[0]
        text = describe_tensor(part)
        if self._tails and part.dim() and part.data_ptr() == value.data_ptr() and part.shape[0] < value.shape[0]:
            text += f", padded rows {describe_tensor(value[part.shape[0] :])}"
        return Detail(text, int(digest(part)))


def observe_eager(step: Callable[[], Any], observer: Observer) -> list[Operation]:
    """Run a step; its operators with their regions."""
    noted = 0

    def new_operations() -> range:
        nonlocal noted
        start, noted = noted, len(observer.operations)
        return range(start, noted)

    log = RegionLog(new_operations)
    with logging_regions(log), observer:
        step()
    return [_named(op, op.name, log.regions.get(i, "")) for i, op in enumerate(observer.operations)]


def observe_replay(recording: Recording, observer: Observer) -> list[Operation]:
    """Replay a recording piece by piece. Only what runs through torch's dispatcher is seen: all of a tape, and the
    breaks of others."""
    breakable = recording if isinstance(recording, BreakableRecording) else None
    for part in breakable._parts if breakable is not None else [recording]:
        if breakable is not None and isinstance(part, Break):
            with breakable._mode(), observer:
                part()
        elif isinstance(part, TapeRecording):
            with torch.inference_mode():
                for node, call in zip(part.nodes(), part._calls, strict=True):
                    _observe_call(observer, node.name, node.region, call)
        elif not isinstance(part, Break):
            part.replay()
    return observer.operations


def _observe_call(observer: Observer, name: str, region: str, call: tuple[Callable[..., Any], Any, Any]) -> None:
    function, args, kwargs = call
    before = len(observer.operations)
    with observer:
        function(*args, **kwargs)
    if name.startswith(_UNFILLED):
        del observer.operations[before:]
    elif len(observer.operations) == before + 1:  # an operator, perhaps in its out= form
        observer.operations[before] = _named(observer.operations[before], name, region)


def _named(op: Operation, name: str, region: str) -> Operation:
    return Operation(name, op.line, op.looks, op.inputs, op.results, region)


def _made_or_written(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[torch.Tensor]:
    """Fresh results, then arguments that the operator writes."""
    given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    fresh = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given
    ]
    return fresh + list(_written(func, args, kwargs))


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    if torch.Tag.inplace_view in func.tags:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 of a tensor's bits, computed where it lies."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.view(whole) if flat.dtype is not torch.bool else flat.to(whole)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        total += ((part + 1) * (place * _ODD)).sum()
    return total


def describe_tensor(value: torch.Tensor) -> str:
    """Its dtype, shape and range."""
    head = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.is_complex() or not value.numel():
        return head
    if value.numel() == 1:
        return f"{head} {value.item():g}".replace("nan", "NaN")
    if not value.is_floating_point():
        return f"{head} from {int(value.min())} to {int(value.max())}"
    wide = value.detach().float()
    nans = int(wide.isnan().sum())
    low = float(wide.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).min())
    high = float(wide.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).max())
    spread = f" from {low:.6g} to {high:.6g}" if nans < value.numel() else ""
    return f"{head}{spread}{f', {nans} NaN' if nans else ''}"
