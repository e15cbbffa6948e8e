"""No captures while a step runs: one that begins then is a lazy one, and belongs before the first request.

Whoever runs a step puts its thread into `serving`; platforms call `refuse_capture_while_serving` before they
record, and `no_captures` has torch's own captures do the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.platforms.source_line import calling_line

serving: list[int] = []
"""The threads that are in a step, once for each step. No context variable: other threads may inherit those."""


def refuse_capture_while_serving() -> None:
    """Called before anything is recorded.

    Raises:
        CaptureError: this thread is in a step; names the line that captures.
    """
    if threading.get_ident() in serving:
        raise CaptureError(
            f"a capture while a step runs, at {calling_line()}; capture it before the first step, "
            f"or run that shape once in the warm-ups if a library captures or tunes it at first use"
        )


@contextmanager
def no_captures() -> Iterator[None]:
    """Around code of a step that runs eagerly: `torch.cuda.graph`, `CUDAGraph.capture_begin` and all that is built on
    them (`make_graphed_callables`, `torch.compile(mode="reduce-overhead")`) raise in this thread.

    Other threads capture as they please. Captures that do not go through torch's Python classes are not seen.

    Raises:
        CaptureError: from the line that begins a capture.
    """
    thread = threading.get_ident()
    _hooks.install()
    serving.append(thread)
    try:
        yield
    finally:
        serving.remove(thread)
        _hooks.remove()


class _Hooks:
    """The check in front of torch's ways into a capture, for as long as any thread wants it there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._originals: list[tuple[type, str, Callable[..., Any]]] = []

    def install(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted > 1:
                return
            # The context manager has changed the stream by the time that it begins the capture.
            for owner, name in ((torch.cuda.graph, "__enter__"), (torch.cuda.CUDAGraph, "capture_begin")):
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, _refusing(original))

    def remove(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                for owner, name, original in self._originals:
                    setattr(owner, name, original)
                self._originals = []


_hooks = _Hooks()


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture(*args: Any, **kwargs: Any) -> Any:
        refuse_capture_while_serving()
        return original(*args, **kwargs)

    return capture
