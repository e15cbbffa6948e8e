"""Watched modules: a replay must not read memory that a parameter or buffer has left since the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch.nn.parameter import is_lazy

from stepgraph.runtime.errors import ConfigError, ReplayError

_PLACES_PER_GLANCE = 3  # about 0.2 µs each
_NAMED_IN_ERROR = 3

Place = tuple[Mapping[str, object], str, object, Callable[[], int], int]
"""Where a name is bound (a module's own dictionary, a key), the object there, its address and what that was."""


@dataclass
class _Watched:
    name: str
    module: torch.nn.Module
    captured: dict[str, tuple[torch.device, int]] = field(default_factory=dict)  # by dotted name, at the capture


class AddressAudit:
    """Where the tensors of watched modules lay when the graphs were captured, and whether they lie there still.

    `glance` looks at a few places in turn, and is cheap enough for every replay; `sweep` compares every name.
    Names are looked up in the modules that own them: `module.weight = x` leaves the old tensor as it was. Tensors
    kept as plain attributes are not seen.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._turns: Iterator[tuple[Place, ...]] = cycle([()])

    def watch(self, module: torch.nn.Module, name: str, *, captured: bool) -> None:
        """Add a module; where the graphs are captured already, what it holds now is taken for what they read.

        Raises:
            ConfigError: another module has this name.
        """
        if any(watched.module is module for watched in self._watched):
            return
        if any(watched.name == name for watched in self._watched):
            raise ConfigError(f"watch: another module is watched as {name!r}; give each a name of its own")
        self._watched.append(_Watched(name, module))
        if captured:
            self._remember(self._watched[-1])
            self._plan()

    def remember(self) -> None:
        """The graphs were captured: they read the addresses of now."""
        for watched in self._watched:
            self._remember(watched)
        self._plan()

    def forget(self) -> None:
        """The graphs are gone."""
        for watched in self._watched:
            watched.captured = {}
        self._turns = cycle([()])

    def glance(self) -> None:
        """Look at the next few places; at all of them, by name, if one is not as it was.

        Raises:
            ReplayError: as `sweep`.
        """
        for owner, key, value, address, was in next(self._turns):
            if owner.get(key) is not value or address() != was:
                self.sweep()
                self._plan()  # another object over the same memory: look at that one from now on
                return

    def sweep(self) -> None:
        """Look at every watched tensor.

        Raises:
            ReplayError: names those that moved, from where to where.
        """
        moved: list[str] = []
        for watched in self._watched:
            now = {name: tensor for name, _, _, tensor in _tensors(watched)}
            for name, (device, was) in watched.captured.items():
                if name not in now:
                    moved.append(f"{name} from {device} {was:#x} to nowhere")
                elif now[name].data_ptr() != was:
                    moved.append(f"{name} from {device} {was:#x} to {now[name].device} {now[name].data_ptr():#x}")
        if moved:
            more = f" and {len(moved) - _NAMED_IN_ERROR} more" if len(moved) > _NAMED_IN_ERROR else ""
            raise ReplayError(
                f"moved since the capture: {', '.join(moved[:_NAMED_IN_ERROR])}{more}; the graphs still read the old "
                f"memory: copy_() new values into the old tensor, or release() and capture() again"
            )

    def _remember(self, watched: _Watched) -> None:
        watched.captured = {name: (tensor.device, tensor.data_ptr()) for name, _, _, tensor in _tensors(watched)}

    def _plan(self) -> None:
        """The order of glances. It keeps the tensors alive, so that a rebound one is not freed under its graph."""
        places: list[Place] = []
        for watched in self._watched:
            for name, owner, key, tensor in _tensors(watched):
                if name in watched.captured:
                    places.append((owner, key, tensor, tensor.data_ptr, watched.captured[name][1]))
            for module in watched.module.modules():
                # int() is 0: a submodule has no address, only its identity counts
                places += [(module._modules, key, child, int, 0) for key, child in module._modules.items()]
        step = _PLACES_PER_GLANCE
        self._turns = cycle([tuple(places[at : at + step]) for at in range(0, len(places), step)] or [()])


def _tensors(watched: _Watched) -> Iterator[tuple[str, Mapping[str, object], str, torch.Tensor]]:
    """Each parameter and buffer: its dotted name, the dictionary and key it is bound to, and itself."""
    for path, module in watched.module.named_modules(prefix=watched.name, remove_duplicate=False):
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and not is_lazy(tensor):
                    yield f"{path}.{key}" if path else key, owner, key, tensor
