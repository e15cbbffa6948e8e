"""For debugging: outputs that refuse to be used once a later step has overwritten them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from stepgraph.runtime.errors import ReplayError


class Lease:
    """Whose values a piece of memory holds, and who overwrote them, if anybody has."""

    __slots__ = ("ended_by", "made_by")

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by
        self.ended_by = ""

    def check(self) -> None:
        if self.ended_by:
            raise ReplayError(
                f"output read too late: {self.made_by} made it and {self.ended_by} has overwritten it; "
                f"clone() it before that"
            )

    def end(self, by: str) -> Lease:
        """Overwritten; returns the lease of the new values."""
        self.ended_by = by
        return Lease(by)


class LentTensor(torch.Tensor):
    """An output, or a view of one: every use looks at its lease first. What is copied from it is a plain tensor.

    Arrays and pointers that were taken from it are not watched any more.

    Raises:
        ReplayError: used after a step overwrote it; names both steps.
    """

    lease: Lease

    @staticmethod
    def of(tensor: torch.Tensor, lease: Lease) -> LentTensor:
        lent = tensor.as_subclass(LentTensor)
        lent.lease = lease
        return lent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LentTensor)]
        for tensor in lent:
            tensor.lease.check()
        with torch._C.DisableTorchFunctionSubclass():
            leases = {tensor.untyped_storage()._cdata: tensor.lease for tensor in lent}

            def passed_on(tensor: torch.Tensor) -> torch.Tensor:
                lease = leases.get(tensor.untyped_storage()._cdata)
                if lease is None or isinstance(tensor, LentTensor):  # a copy, or written in place
                    return tensor
                return LentTensor.of(tensor, lease)

            return tree_map_only(torch.Tensor, passed_on, func(*args, **kwargs), is_leaf=_is_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # which would come out as a plain tuple


class Leases:
    """A runner's: of the buffers that its graphs share for their outputs, and of its slab.

    A replay overwrites both. An eager step has outputs of its own, and overwrites the slab alone.
    """

    def __init__(self, slab: torch.Tensor) -> None:
        self._slab = slab.untyped_storage()._cdata
        self._steps = 0
        self._in_slab, self._shared = Lease(""), Lease("")

    def step(self, *, replays: bool) -> None:
        """A staged step is about to run."""
        self._steps += 1
        name = f"step {self._steps}"
        self._in_slab = self._in_slab.end(name)
        if replays:
            self._shared = self._shared.end(name)

    def verified(self) -> None:
        """`verify` has replayed, and put the slab back."""
        self._shared = self._shared.end("verify()")

    def lend(self, outputs: Mapping[str, torch.Tensor], *, replayed: bool) -> dict[str, torch.Tensor]:
        """The last step's outputs; those that a later step may overwrite, with a lease."""
        lent: dict[str, torch.Tensor] = {}
        for name, tensor in outputs.items():
            in_slab = tensor.untyped_storage()._cdata == self._slab
            lease = self._in_slab if in_slab else self._shared
            lent[name] = LentTensor.of(tensor, lease) if in_slab or replayed else tensor
        return lent
