"""A platform whose recordings keep nothing alive, as CUDA graphs do not; a tape would keep all that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgraph.runtime.platforms.tape import TapePlatform


class _Reads(TorchDispatchMode):
    """Notes the storages that a step uses and has not made."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, StorageWeakRef] = {}
        self._made: dict[int, StorageWeakRef] = {}  # the references keep an id from reuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self.outside[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self.outside:
                self._made[storage._cdata] = StorageWeakRef(storage)
        return result


class Addresses:
    """A recording. Its replay computes nothing; it fails where a graph would read memory that was given back."""

    def __init__(self, outside: list[StorageWeakRef]) -> None:
        self._outside = outside
        self.replays = 0

    def replay(self) -> None:
        gone = sum(one.expired() for one in self._outside)
        assert not gone, f"a replay uses {len(self._outside)} tensors from outside, of which {gone} are freed"
        self.replays += 1

    def release(self) -> None:
        self._outside = []


class AddressPlatform(TapePlatform):
    """recordings: all that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Addresses] = []

    def record(self, step: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        with _Reads() as reads:
            recording, result = super().record(step, pool)
        recording.release()
        self.recordings.append(Addresses(list(reads.outside.values())))
        return self.recordings[-1], result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
