"""What a break returns: where the segments behind it read it, and how each replay brings it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.plain import kept_value, same_value

Alias = Callable[[torch.Tensor], torch.Tensor]
"""The place of an argument, for a break to keep."""
Place = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A place for what a break made, as the step gets it and as the break may keep it."""

_ALIGNMENT = 16  # bytes: a multiple of every dtype's size
_WHY = "the segments behind it read the recorded place, so a break returns the same at every replay"


class _Layout(NamedTuple):
    """Where a tensor lies in a span. start: in bytes."""

    start: int
    stride: tuple[int, ...]


class _Shared(NamedTuple):
    """A span of memory that several results lie in. held: its bytes. layouts: of the results, by index."""

    held: torch.Tensor
    layouts: dict[int, _Layout]


class Results:
    """The results of one break, as the segments read them. Made by `lay_out`.

    held: the leaves; of tensors their places.
    first: for each leaf the first one in the same memory, or itself; None for what lies in an argument.
    shared: what lies in one memory with others.
    arguments: where the memory of the arguments begins.
    """

    def __init__(
        self,
        held: list[Any],
        spec: TreeSpec,
        first: list[int | None],
        shared: Sequence[_Shared],
        arguments: frozenset[int],
    ) -> None:
        self._held, self._spec, self._is_leaf = held, spec, spec.is_leaf()
        self._first, self._shared, self._arguments = first, shared, arguments
        self._alone = [
            index
            for index, leaf in enumerate(held)
            if isinstance(leaf, torch.Tensor)
            and leaf.numel()
            and first[index] is not None
            and not any(index in together.layouts for together in shared)
        ]

    def bring(self, result: Any) -> None:
        """Check a replay's result and copy it to where the segments read it.

        Raises:
            ReplayError: another structure, shape, dtype or plain value, or other sharing of memory.
        """
        fresh: Sequence[Any] = (result,)
        if not self._is_leaf:
            fresh, spec = tree_flatten(result)
            if spec != self._spec:
                raise ReplayError(f"returned {spec} where the recording had {self._spec}; {_WHY}")
        homes: dict[int, int] = {}
        for index, (held, value) in enumerate(zip(self._held, fresh, strict=True)):
            if not isinstance(held, torch.Tensor):
                if not same_value(held, value):
                    raise _unlike(held, value)
            elif not isinstance(value, torch.Tensor) or value.shape != held.shape or value.dtype != held.dtype:
                raise _unlike(held, value)
            elif value.numel():
                self._check_memory(index, held, value, homes)
        for index in self._alone:
            held, value = self._held[index], fresh[index]
            if value.data_ptr() != held.data_ptr():
                held.copy_(value)
            elif value.stride() != held.stride():
                raise _unlike(held, value)
        for shared in self._shared:
            start, stop, layouts = _span({index: fresh[index] for index in shared.layouts})
            if layouts != shared.layouts or not all(_is_plain(fresh[index]) for index in layouts):
                raise ReplayError(f"returned tensors that share their memory in another way than recorded; {_WHY}")
            shared.held.copy_(_bytes(fresh[next(iter(layouts))], start, stop))

    def _check_memory(self, index: int, held: torch.Tensor, value: torch.Tensor, homes: dict[int, int]) -> None:
        home = value.untyped_storage().data_ptr()
        in_argument = self._first[index] is None
        if in_argument != (home in self._arguments):
            was, now = ("an argument's", "its own") if in_argument else ("its own", "an argument's")
            raise ReplayError(
                f"returned a tensor in {now} memory where the recording had one in {was}; {_WHY}: a copy of the "
                f"argument where it may be the argument itself"
            )
        if in_argument:
            if value.data_ptr() != held.data_ptr() or value.stride() != held.stride():
                raise ReplayError(f"returned another argument, or another part of it, than at the recording; {_WHY}")
        elif homes.setdefault(home, index) != self._first[index]:
            raise ReplayError(f"returned tensors that share their memory with others than at the recording; {_WHY}")


def lay_out(
    result: Any,
    arguments: Sequence[Any],
    *,
    place: Place,
    alias: Alias = torch.Tensor.detach,
    begin: Callable[[], None] = lambda: None,
) -> tuple[Any, Results]:
    """Give a break's result its places; returns it as the step goes on with it, and what brings a replay's there.

    Results in an argument's memory stay there. Those that share memory of their own share it in their places too.

    arguments: of the break, all leaves. begin: opens the segment; alias is called before it, place behind it.

    Raises:
        CaptureError: a result that a replay could not compare, or could not keep in shared memory.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # our own looks and views are no part of a step
        leaves, spec = tree_flatten(result)
        given = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        known = frozenset(tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel())
        handed, held = list(leaves), list(leaves)
        first: list[int | None] = list(range(len(leaves)))
        families: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                held[index] = kept_value(leaf, arguments)
            elif not leaf.numel():
                families[~index] = [index]
            elif (home := leaf.untyped_storage().data_ptr()) in known:
                held[index], first[index] = alias(leaf), None
            elif home:
                family = families.setdefault(home, [])
                family.append(index)
                first[index] = family[0]
            else:
                raise CaptureError(f"returns a {type(leaf).__name__} on {leaf.device} that has no memory of its own")
        begin()
        shared = []
        for family in families.values():
            if len(family) == 1:
                handed[family[0]], held[family[0]] = place(leaves[family[0]])
            else:
                shared.append(_place_together({index: leaves[index] for index in family}, handed, held, place))
        return tree_unflatten(handed, spec), Results(held, spec, first, shared, known)


def _place_together(tensors: dict[int, torch.Tensor], handed: list[Any], held: list[Any], place: Place) -> _Shared:
    for tensor in tensors.values():
        if not _is_plain(tensor):
            raise CaptureError(
                f"returns a {type(tensor).__name__} that shares its memory with another result and is more than shape "
                f"and strides; return a copy of it"
            )
    start, stop, layouts = _span(tensors)
    placed, kept = place(_bytes(next(iter(tensors.values())), start, stop))
    views: dict[int, torch.Tensor] = {}  # what was one object stays one
    for index, tensor in tensors.items():
        if id(tensor) not in views:
            views[id(tensor)] = _view(placed, tensor, layouts[index])
        handed[index], held[index] = views[id(tensor)], _view(kept, tensor, layouts[index])
    return _Shared(kept, layouts)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether address, shape and strides are all there is to it."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())


def _span(tensors: dict[int, torch.Tensor]) -> tuple[int, int, dict[int, _Layout]]:
    """The bytes from start up to stop of a storage that hold all the tensors, and where each lies in them."""
    starts = {index: int(tensor.storage_offset()) * tensor.itemsize for index, tensor in tensors.items()}
    start = min(starts.values()) // _ALIGNMENT * _ALIGNMENT
    stop = max(
        starts[index] + (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.itemsize
        for index, t in tensors.items()
    )
    return start, stop, {index: _Layout(starts[index] - start, t.stride()) for index, t in tensors.items()}


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def _view(span: torch.Tensor, like: torch.Tensor, layout: _Layout) -> torch.Tensor:
    offset = (span.storage_offset() + layout.start) // like.itemsize
    empty = torch.empty(0, dtype=like.dtype, device=span.device)
    return empty.set_(span.untyped_storage(), offset, like.shape, layout.stride)


def _unlike(held: Any, value: Any) -> ReplayError:
    return ReplayError(f"returned {_describe(value)} where the recording had {_describe(held)}; {_WHY}")


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"a tensor of {tuple(value.shape)} {value.dtype}, strides {value.stride()}"
