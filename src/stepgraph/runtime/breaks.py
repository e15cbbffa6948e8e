"""Breaks: functions that a breakable recording leaves out and calls again, eagerly, at every replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class BreakSession(Protocol):
    """A breakable recording in the making."""

    def at_break(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Close the segment, call `function` eagerly, note the call for every replay, open the next segment."""


_session: ContextVar[BreakSession | None] = ContextVar("stepgraph_break_session", default=None)


def graph_break(function: F, *, name: str | None = None) -> F:
    """Mark a function as a break. A plain call everywhere but in a breakable recording; a full graph records it.

    At a replay its tensor arguments lie where they lay at the recording, and other arguments are the same objects. What
    it returns lies at the same addresses too: results are copied to where the recording had them, unless they lie in an
    argument, which they do at every replay or at none. They keep shape and dtype, and which of them share memory. Plain
    values among them stay equal, since the recording has them built in; other objects are refused, unless they are an
    argument. Every other tensor that it makes is its own: a recorded operation may not read it.

    A `try` of the step around a break does not exist at a replay, which goes from segment to segment: an error leaves
    the replay, and what would handle it belongs inside the break.

    name: what reports call it; by default the function's qualified name.
    """
    label = str(name or getattr(function, "__qualname__", type(function).__qualname__))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        session = _session.get()
        return function(*args, **kwargs) if session is None else session.at_break(label, function, args, kwargs)

    return cast(F, call)


@contextmanager
def breaking(session: BreakSession | None) -> Iterator[None]:
    """Platforms open this around the step they record. Inside a break's own function there is no session."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)
