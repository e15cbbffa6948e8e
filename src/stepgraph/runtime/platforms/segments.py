"""Records a step in segments, on any platform: what happens at a break."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stepgraph.runtime.break_cost import DeviceClock
from stepgraph.runtime.breakable import Break, BreakableRecording, name_break
from stepgraph.runtime.breaks import breaking
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.platforms.base import Recording
from stepgraph.runtime.platforms.refusals import refuse_operator
from stepgraph.runtime.regions import logging_regions
from stepgraph.runtime.results import lay_out

T = TypeVar("T")


class Segments(Protocol):
    """A platform's way to record a step piece by piece. The step really runs: at `close` at the latest."""

    def open(self) -> None:
        """Begin a segment."""

    def close(self) -> Recording | None:
        """End the open segment; None if it recorded nothing."""

    def aside(self, name: str) -> AbstractContextManager[None]:
        """Around the function of the break of this name, between two segments: it is not recorded."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's place, for a break to keep. Between two segments."""

    def place(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A place for what a break returned, as the step gets it and as the break may keep it.

        In the open segment, whose operations find the values there when they run.
        """


def record_segments(segments: Segments, step: Callable[[], T], *, every_op: bool) -> tuple[list[Recording | Break], T]:
    """Run one call of `step` and record it; returns the parts and what the step returned.

    Raises:
        CaptureError: the step did what a recording cannot hold.
    """
    session = _Session(segments)
    segments.open()
    with breaking(session), _EveryOp(session) if every_op else nullcontext():
        result = step()
    session.finish()
    return session.parts, result


def record_whole(step: Callable[[], T], clock: Callable[[], DeviceClock] | None = None) -> tuple[BreakableRecording, T]:
    """The whole step as one break: every replay runs its Python, and its results go where the first ones were put."""

    def place(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        placed = torch.empty_like(tensor).copy_(tensor)
        return placed, placed

    result, results = lay_out(step(), (), place=place)
    return BreakableRecording([Break("step", step, (), {}, results)], clock), result


class _Session:
    """The recording in the making.

    inside: the break that is on, or the one that failed; nothing is recorded then.
    """

    def __init__(self, segments: Segments) -> None:
        self.parts: list[Recording | Break] = []
        self.inside: str | None = None
        self._segments = segments
        self._failed = False

    def at_break(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._refuse_to_go_on()
        if self.inside is not None:
            return function(*args, **kwargs)
        self.inside = name
        try:
            handed = self._break(name, function, args, kwargs)
        except BaseException:
            self._failed = True
            raise
        self.inside = None
        return handed

    def finish(self) -> None:
        """The step has returned."""
        self._refuse_to_go_on()
        self._end_segment()

    def _break(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._end_segment()
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        held_args, held_kwargs = tree_map_only(torch.Tensor, self._segments.alias, (args, kwargs))
        layouts = [_layout(tensor) for tensor in tensors]
        try:
            with self._segments.aside(name), breaking(None), logging_regions(None):
                result = function(*args, **kwargs)
            if layouts != [_layout(tensor) for tensor in tensors]:
                raise CaptureError("gives an argument another shape or other memory; return a new tensor instead")
            handed, results = lay_out(
                result, leaves, place=self._segments.place, alias=self._segments.alias, begin=self._segments.open
            )
        except Exception as error:
            name_break(error, name)
            raise
        self.parts.append(Break(name, function, held_args, held_kwargs, results))
        return handed

    def _refuse_to_go_on(self) -> None:
        if self._failed:
            raise CaptureError(
                f"break {self.inside} failed and the step went on; let the error pass, or catch it inside the break"
            )

    def _end_segment(self) -> None:
        segment = self._segments.close()
        if segment is not None:
            self.parts.append(segment)


class _EveryOp(TorchDispatchMode):
    """Breaks a recording at every operator that the dispatcher sees and that does more than make a view.

    What is launched without the dispatcher, such as Triton kernels, lands in the segments between.
    """

    def __init__(self, session: _Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._session.inside is not None or _makes_a_view(func):
            return func(*args, **kwargs)
        refuse_operator(func, args)
        return self._session.at_break(str(func), func, args, kwargs)


def _makes_a_view(func: torch._ops.OpOverload) -> bool:
    """Whether it only changes metadata; as a break it would do so again at each replay."""
    if torch.Tag.inplace_view in func.tags:
        return True
    return not func._schema.is_mutable and any(value.alias_info is not None for value in func._schema.returns)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # our own look at the address is no host read
        return tensor.data_ptr(), tensor.shape, tensor.stride()
