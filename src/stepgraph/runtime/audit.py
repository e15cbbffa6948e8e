"""What is watched: a replay must not use memory that a tensor or a workspace has left since the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from stepgraph.runtime.errors import ConfigError, ReplayError
from stepgraph.runtime.workspace import Workspace

_PLACES_PER_GLANCE = 2  # about 0.3 µs each
_NAMED_IN_ERROR = 3

Watchable = torch.nn.Module | Mapping[str, Any] | Workspace

Place = tuple[Mapping[str, object], str, object, Callable[[], int], int]
"""Where a name is bound (a module's own dictionary, a key), the object there, its address and what that was."""


@dataclass
class _Watched:
    name: str
    target: torch.nn.Module | Mapping[str, Any]
    captured: dict[str, tuple[torch.device, int]] = field(default_factory=dict)  # by dotted name, at the capture


@dataclass
class _WatchedWorkspace:
    name: str
    workspace: Workspace
    captured: int | None = None  # its generation at the capture; it is locked from then on


class AddressAudit:
    """Where all that is watched lay when the graphs were captured, and whether it lies there still.

    `glance` looks at a few places in turn, and is cheap enough for every replay; `sweep` compares every name.
    Names are looked up where they are bound: `module.weight = x` and `mapping["k"] = x` leave the old tensor as it
    was. Workspaces count their moves, so each is looked at every time; they are locked while there are graphs.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._workspaces: list[_WatchedWorkspace] = []
        self._turns: Iterator[tuple[Place, ...]] = cycle([()])

    def watch(self, target: Watchable, name: str, *, captured: bool) -> None:
        """Add a module, a workspace, or a mapping, of whose values the tensors count.

        captured: there are graphs already; where it lies now is taken for what they use.

        Raises:
            ConfigError: something else has this name (workspaces may share one), or it is none of these.
        """
        if not isinstance(target, torch.nn.Module | Mapping | Workspace):
            raise ConfigError(
                f"watch: a module, a mapping from names to tensors, or a Workspace is watched, not "
                f"{type(target).__name__}; give a single tensor as {{'name': tensor}}"
            )
        if isinstance(target, Workspace):
            if all(known.workspace is not target for known in self._workspaces):
                self._workspaces.append(_WatchedWorkspace(name, target))
        elif all(known.target is not target for known in self._watched):
            if any(known.name == name for known in self._watched):
                raise ConfigError(f"watch: another module or mapping is watched as {name!r}; give each its own name")
            self._watched.append(_Watched(name, target))
            if captured:
                self._remember(self._watched[-1])
        if captured:
            self._lock()
            self._plan()

    def remember(self) -> None:
        """The graphs were captured: they read the addresses of now."""
        for watched in self._watched:
            self._remember(watched)
        self._lock()
        self._plan()

    def forget(self) -> None:
        """The graphs are gone."""
        for watched in self._watched:
            watched.captured = {}
        for known in self._workspaces:
            if known.captured is not None:
                known.captured = None
                known.workspace.unlock()
        self._turns = cycle([()])

    def glance(self) -> None:
        """Look at the next few places; at all of them, by name, if one is not as it was.

        Raises:
            ReplayError: as `sweep`.
        """
        for known in self._workspaces:
            if known.workspace.generation != known.captured:
                self.sweep()
        for owner, key, value, address, was in next(self._turns):
            if owner.get(key) is not value or address() != was:
                self.sweep()
                self._plan()  # another object over the same memory: look at that one from now on
                return

    def sweep(self) -> None:
        """Look at every tensor and workspace.

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
        for known in self._workspaces:
            now_at = known.workspace.generation
            if known.captured not in (None, now_at):
                moved.append(f"workspace {known.name or '(unnamed)'} from generation {known.captured} to {now_at}")
        if moved:
            more = f" and {len(moved) - _NAMED_IN_ERROR} more" if len(moved) > _NAMED_IN_ERROR else ""
            raise ReplayError(
                f"moved since the capture: {', '.join(moved[:_NAMED_IN_ERROR])}{more}; the graphs still read the old "
                f"memory: copy_() new values into the old tensor, or release() and capture() again"
            )

    def _remember(self, watched: _Watched) -> None:
        watched.captured = {name: (tensor.device, tensor.data_ptr()) for name, _, _, tensor in _tensors(watched)}

    def _lock(self) -> None:
        for known in self._workspaces:
            if known.captured is None:
                known.workspace.lock()
                known.captured = known.workspace.generation

    def _plan(self) -> None:
        """The order of glances. It keeps the tensors alive, so that a rebound one is not freed under its graph."""
        places: list[Place] = []
        for watched in self._watched:
            for name, owner, key, tensor in _tensors(watched):
                if name in watched.captured:
                    places.append((owner, key, tensor, tensor.data_ptr, watched.captured[name][1]))
            if isinstance(watched.target, torch.nn.Module):
                for module in watched.target.modules():
                    # int() is 0: a submodule has no address, only its identity counts
                    places += [(module._modules, key, child, int, 0) for key, child in module._modules.items()]
        step = _PLACES_PER_GLANCE
        self._turns = cycle([tuple(places[at : at + step]) for at in range(0, len(places), step)] or [()])


def module_of(step: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that a step is, or is a method of, also where some of its arguments are given already."""
    while isinstance(step, partial):
        step = step.func
    owner = getattr(step, "__self__", step)
    return owner if isinstance(owner, torch.nn.Module) else None


def require_tensors(state: Mapping[str, Any]) -> None:
    """Refuse a state that could not be saved and compared.

    Raises:
        ConfigError: no mapping, or names what in it is no tensor.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: a mapping from names to tensors is needed, not {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"state {name}: a tensor is needed, not {type(value).__name__}")


def _tensors(watched: _Watched) -> Iterator[tuple[str, Mapping[str, object], str, torch.Tensor]]:
    """Each tensor: its dotted name, the dictionary and key it is bound to, and itself."""
    for path, owner in _owners(watched):
        for key, tensor in owner.items():
            if isinstance(tensor, torch.Tensor) and not is_lazy(tensor):
                yield f"{path}.{key}" if path else key, owner, key, tensor


def _owners(watched: _Watched) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The dictionaries that bind parameters and buffers, each with its module's path; or the mapping itself."""
    if not isinstance(watched.target, torch.nn.Module):
        yield watched.name, watched.target
        return
    for path, module in watched.target.named_modules(prefix=watched.name, remove_duplicate=False):
        yield path, module._parameters
        yield path, module._buffers
