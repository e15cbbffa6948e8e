"""Records a step's operators with the storages they read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from stepgraph.runtime.platforms.refusals import refusal, refuse_operator
from stepgraph.runtime.platforms.source_line import calling_line
from stepgraph.runtime.platforms.tape.out_variants import out_variant
from stepgraph.runtime.platforms.tape.pool import TapePool

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


class TapeRecorder(TorchDispatchMode):
    """Collects the calls that repeat a step.

    Views cost nothing at a replay: they are tensors over storages that the recording already holds.
    Results of functional operators become fixed storages that each replay writes again. Inside a break nothing is
    recorded; the storages that the break makes are noted, since no recorded call may read one of them.

    pool: counts the storages that the recording holds; None: nobody does.
    """

    def __init__(self, pool: TapePool | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.calls: list[Call] = []
        self.names: list[str] = []
        self._noted = 0
        self._frozen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._break: str | None = None
        self._hidden: dict[int, tuple[StorageWeakRef, str]] = {}  # by storage; the reference keeps its id from reuse

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.paused:
            refuse_operator(func, args)
        # A custom operator's Python body is replayed as a whole and may read what it likes.
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            self._frozen.pop(id(args[0]), None)  # only metadata changed: later uses freeze the new shape
        elif self.paused:
            # a tensor of host data is lifted from one that no operator made
            self._note_made(result, () if func is torch.ops.aten.lift_fresh.default else (args, kwargs))
        else:
            self._append(func, args, kwargs, result)
        return result

    def call_opaque(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run `function` unseen and record it as one call."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        if self.paused:
            self._note_made(result, (args, kwargs))
            return result
        frozen_args, frozen_kwargs = self._freeze(args), self._freeze(kwargs)
        call = _rerun_into(function, frozen_args, frozen_kwargs, self._fresh(result, (args, kwargs)))
        self._add(getattr(function, "__qualname__", type(function).__qualname__), call)
        return result

    @property
    def paused(self) -> bool:
        """Whether a break's function runs."""
        return self._break is not None

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Around the function of the break of this name."""
        self._break = name
        try:
            yield
        finally:
            self._break = None
        self._hidden = {key: made for key, made in self._hidden.items() if not made[0].expired()}

    def cut(self) -> tuple[list[Call], list[str]]:
        """The calls since the last cut, and their names."""
        calls, names = self.calls, self.names
        self.calls, self.names, self._noted = [], [], 0
        return calls, names

    def new_calls(self) -> range:
        """Which calls were added since this was last asked."""
        start, self._noted = self._noted, len(self.calls)
        return range(start, self._noted)

    def finish(self) -> None:
        """Let go of everything that only the recording needed."""
        self._frozen.clear()
        self._hidden.clear()

    def _append(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        outputs = self._fresh(result, (args, kwargs))
        if func._schema.is_mutable:
            call: Call = (func, self._freeze(args), self._freeze(kwargs))
            self._add(str(func), _rerun_into(*call, outputs) if any(o is not None for o in outputs) else call)
        elif all(output is None for output in outputs):
            return  # a view, or no tensor at all
        else:
            self._add(str(func), self._functional(func, args, kwargs, outputs))

    def _add(self, name: str, call: Call) -> None:
        self.names.append(name)
        self.calls.append(call)

    def _functional(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor | None],
    ) -> Call:
        frozen_args, frozen_kwargs = self._freeze(args), self._freeze(kwargs)
        variant = out_variant(func)
        if variant is None or len(variant[1]) != len(outputs) or any(output is None for output in outputs):
            return _rerun_into(func, frozen_args, frozen_kwargs, outputs)
        out_func, names = variant
        return out_func, frozen_args, {**frozen_kwargs, **dict(zip(names, outputs, strict=True))}

    def _fresh(self, result: Any, inputs: Any) -> list[torch.Tensor | None]:
        """For each tensor leaf of the result: its frozen form, or None where it lies in an input's storage."""
        known = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = [None if leaf.untyped_storage()._cdata in known else self.alias(leaf) for leaf in leaves]
        for tensor in fresh:
            if tensor is not None:
                self.own(tensor)
        return fresh

    def own(self, tensor: torch.Tensor) -> None:
        """The recording holds this tensor's storage, which replays write."""
        if self._pool is not None:
            self._pool.add(tensor.untyped_storage())

    def _freeze(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, self.alias, tree)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of our own over the same storage: `param.data = other` must not be seen by a replay."""
        if self._hidden:
            self._refuse_hidden(tensor)
        known = self._frozen.get(id(tensor))
        if known is None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                known = self._frozen[id(tensor)] = (tensor, tensor.detach())
        return known[1]

    def _note_made(self, result: Any, inputs: Any) -> None:
        """Note the storages of a break's result that are not its inputs'."""
        known = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in known:
                self._hidden[storage._cdata] = StorageWeakRef(storage), f"{self._break} ({calling_line()})"

    def _refuse_hidden(self, tensor: torch.Tensor) -> None:
        made = self._hidden.get(tensor.untyped_storage()._cdata)
        if made is not None:
            raise refusal(
                "this line",
                f"reads a tensor that break {made[1]} makes without returning it: at a replay that is another tensor; "
                f"return it from the break, or hand the break a tensor to write into",
            )


def _rerun_into(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor | None]
) -> Call:
    """Call `function` again and copy its fresh results to where the recording had them."""

    def rerun(*args: Any, **kwargs: Any) -> None:
        results = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for output, result in zip(outputs, results, strict=True):
            if output is not None:
                output.copy_(result)

    return rerun, args, kwargs
