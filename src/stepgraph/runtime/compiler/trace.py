"""Traces one call of a step into pieces, each a graph of operators between two breaks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.runtime.breaks import breaking
from stepgraph.runtime.compiler.pieces import Layout, Ref, Trace, TracedBreak, TracedPiece
from stepgraph.runtime.platforms.refusals import HostReadGuard, refusal, refuse_operator

T = TypeVar("T")


def trace(step: Callable[[], T]) -> tuple[Trace, T]:
    """Run `step` once, operator by operator, and note what it does; also returns what it returned.

    What is launched without torch's dispatcher, such as a Triton kernel outside a custom operator, is not seen.

    Raises:
        CaptureError: the step did what a piece cannot hold; names the line.
    """
    tracer = _Tracer()
    with tracer, HostReadGuard(lambda: tracer.paused), breaking(tracer):
        result = step()
    with _disable_current_modes():
        return tracer.finish(result), result


class _Tracer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self._parts: list[TracedPiece | TracedBreak] = []
        self._piece = TracedPiece()
        self._made: Any = WeakTensorKeyDictionary()  # by tensor: the part that made it, and the node or leaf
        self._refs: dict[tuple[int, Any], Ref] = {}
        self._inputs: dict[Any, Node] = {}  # of the open piece
        self._hidden: dict[int, StorageWeakRef] = {}  # made in a break and not returned

    # Operators

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.paused:
            result = func(*args, **kwargs)
            self._note_hidden(result, (args, kwargs))
            return result
        refuse_operator(func, args)
        if torch.Tag.inplace_view in func.tags:
            raise refusal(str(func), "changes the shape of a tensor in place, which a compiled piece cannot follow")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _is_view(func) and tensors and not any(tensor in self._made for tensor in tensors):
            return func(*args, **kwargs)  # a view of what is outside is outside
        nodes = tree_map_only(torch.Tensor, self._node, (args, kwargs))
        self._note_written(func, args, kwargs)
        result = func(*args, **kwargs)
        node = self._piece.graph.call_function(func, *nodes)
        self._piece.work = self._piece.work or not _is_view(func)
        if isinstance(result, torch.Tensor):
            self._remember(result, node)
        elif isinstance(result, list | tuple):
            for index, leaf in enumerate(result):
                if isinstance(leaf, torch.Tensor):
                    self._remember(leaf, self._piece.graph.call_function(operator.getitem, (node, index)))
        return result

    def _remember(self, tensor: torch.Tensor, node: Node) -> None:
        if tensor not in self._made and not self._is_input(tensor):  # an operator may return its argument
            self._made[tensor] = (len(self._parts), node)

    def _note_written(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._piece.written.add(_storage(leaf))

    def _node(self, tensor: torch.Tensor) -> Node:
        """The tensor in the open piece's graph."""
        made = self._made.get(tensor)
        if made is not None and made[0] == len(self._parts):
            node: Node = made[1]
            return node
        key = made if made is not None else _identity(tensor)
        if key not in self._inputs:
            piece = self._piece
            with piece.graph.inserting_after(next(reversed(self._inputs.values()), None)):  # in front of all operators
                self._inputs[key] = piece.graph.placeholder(f"input_{len(piece.inputs)}")
            piece.inputs.append(self._value(tensor))
            piece.layouts.append(_layout(tensor))
            piece.storages.append(_storage(tensor))
        return self._inputs[key]

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return _identity(tensor) in self._inputs

    # What goes from part to part

    def _value(self, tensor: torch.Tensor) -> Ref | torch.Tensor:
        """Outside its piece: the Ref of what the step made, or a tensor of our own over memory that was there."""
        made = self._made.get(tensor)
        if made is None:
            if _storage(tensor) in self._hidden:
                raise refusal("this line", "reads a tensor that a break makes without returning it")
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return tensor.detach()
        if made not in self._refs:
            ref = self._refs[made] = Ref(len(self._refs))
            index, what = made
            part = self._parts[index] if index < len(self._parts) else self._piece
            if isinstance(part, TracedPiece):
                part.outputs.append((what, ref))
            else:
                part.results[what] = ref
        return self._refs[made]

    # Breaks

    def at_break(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See BreakSession."""
        if self.paused:
            return function(*args, **kwargs)
        held_args, held_kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        self._close()
        self.paused = True
        with breaking(None):
            result = function(*args, **kwargs)
        self.paused = False
        self._hidden = {key: made for key, made in self._hidden.items() if not made.expired()}
        leaves = tree_leaves(result)
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                self._hidden.pop(_storage(leaf), None)
                self._made[leaf] = (len(self._parts), index)
        self._parts.append(TracedBreak(name, function, held_args, held_kwargs, [None] * len(leaves)))
        return result

    def finish(self, result: Any) -> Trace:
        held = tree_map_only(torch.Tensor, self._value, result)
        self._close()
        return Trace(self._parts, held)

    def _close(self) -> None:
        if len(self._piece.graph.nodes):
            self._parts.append(self._piece)
        self._piece, self._inputs = TracedPiece(), {}

    def _note_hidden(self, result: Any, inputs: Any) -> None:
        known = {_storage(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known:
                self._hidden[_storage(leaf)] = StorageWeakRef(leaf.untyped_storage())


def _is_view(func: torch._ops.OpOverload) -> bool:
    return not func._schema.is_mutable and any(value.alias_info is not None for value in func._schema.returns)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    offset = tensor.storage_offset()
    return _storage(tensor), offset, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _layout(tensor: torch.Tensor) -> Layout:
    itemsize = tensor.element_size()
    start = int(tensor.storage_offset()) * itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = (int(reach) + 1) * itemsize if tensor.numel() else 0
    with torch._C.DisableTorchFunction():  # our own look at the address is no host read
        residue = tensor.data_ptr() % 64
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, start, start + length, residue)
