"""GraphPool: what runners that share memory share: the platform's pool, one turn, and the stream of the last step.

What a runner calls:

* a step: `pool.enter()`, then `try: ... finally: pool.leave()`, before anything else of it;
* capture and release: `refuse_capture_while_serving()` first where it captures, then `with pool.alone():`;
* recording: inside of that `pool.platform.record*(step, pool.handle)`, then `pool.holds_graphs = True`; `pool.renew()`
  after a capture that failed (out of memory only where the pool holds no graphs) and after a release.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepgraph.runtime.capture_guard import serving
from stepgraph.runtime.errors import CaptureError, ReplayError
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.platforms.source_line import calling_line


class GraphPool:
    """Memory that the graphs of one or more runners share, so that no two of them may run at the same time.

    platform: records for all of them. Memory is shared between captures on one stream only, and each thread has one
        of its own: capture from one thread where memory counts.

    One thread at a time is in a step, a capture or a release; a second one is refused, not queued, since the step it
    prepared for is no longer the next. Steps run on their caller's stream. Who changes the stream calls `follow()` on
    the new one; a step on another stream is refused while the last one still works.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.holds_graphs = False  # the present handle; set by who records
        self._handle: Any = None
        self._turn = threading.Lock()
        self._inside = 0  # the thread that holds the turn
        self._alone = False  # whether it holds it for something that is no step
        self._stream: int | None = None  # of the last step, as the driver's handle
        self._index = platform.device.index
        self._stream_now: Callable[[int], int] | None = None
        if platform.device.type == "cuda":
            self._stream_now = (
                torch._C._cuda_getCurrentRawStream
            )  # torch.cuda.current_stream() takes longer than a step may

    @property
    def handle(self) -> Any:
        """The platform's pool, for its next recording.

        Raises:
            CaptureError: this thread does not hold the pool for a capture (`alone()`); names the line that asks.
        """
        if not self._alone or self._inside != threading.get_ident():
            raise CaptureError(
                f"a recording into a runner's pool outside of a capture, at {calling_line()}; its graphs may run "
                f"meanwhile: record inside `with pool.alone():`, or into a pool of your own"
            )
        if self._handle is None:
            self._handle = self.platform.new_pool()
        return self._handle

    def nbytes(self) -> int:
        """What the present pool has taken for its recordings."""
        return 0 if self._handle is None else self.platform.pool_bytes(self._handle)

    def renew(self) -> None:
        """Record into a fresh pool from now on. A failed capture spends the old one, and so does giving all of its
        graphs back; the graphs that it still holds replay as before."""
        self._handle, self.holds_graphs = None, False

    def enter(self) -> None:
        """Begin a step on this thread's current stream. About 1 µs.

        Raises:
            ReplayError: another step of the pool is not over: in another thread, in this one, or on another stream.
        """
        if not self._turn.acquire(False):
            raise self._occupied()
        thread = self._inside = threading.get_ident()
        if self._stream_now is not None:
            stream = self._stream_now(self._index)
            if stream != self._stream:
                try:
                    self._change_to(stream)
                except BaseException:
                    self._give_turn_back()
                    raise
        serving.append(thread)

    def leave(self) -> None:
        """End the step."""
        serving.remove(self._inside)
        self._inside = 0
        self._turn.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the turn for something that is no step.

        Raises:
            ReplayError: somebody holds it.
        """
        if not self._turn.acquire(False):
            raise self._occupied()
        try:
            self._inside, self._alone = threading.get_ident(), True
            yield
        finally:
            self._give_turn_back()

    def follow(self) -> None:
        """Have this thread's current stream wait for the last step's, and let the next step run on it.

        Nothing waits on the host. Where there are no streams, it does nothing.

        Raises:
            ReplayError: somebody is in a step.
        """
        with self.alone():
            if self._stream_now is None:
                return
            stream = self._stream_now(self._index)
            if self._stream not in (None, stream):
                torch.cuda.current_stream(self.platform.device).wait_stream(self._last_stream())
            self._stream = stream

    def _change_to(self, stream: int) -> None:
        """Without a word from the caller, only once the last stream has nothing left to do."""
        if self._stream is not None and not self._last_stream().query():
            raise ReplayError(
                f"two streams in one pool of graphs: a step was called on {_stream_name(stream)} while "
                f"{_stream_name(self._stream)}, where the last one ran, still works; call the runner's pool.follow() "
                f"on the new stream, which makes it wait for the old one"
            )
        self._stream = stream

    def _give_turn_back(self) -> None:
        self._inside, self._alone = 0, False
        self._turn.release()

    def _last_stream(self) -> torch.cuda.Stream:
        if not self._stream:  # torch takes the default stream's handle for none at all
            return torch.cuda.default_stream(self.platform.device)
        return torch.cuda.ExternalStream(self._stream, device=self.platform.device)

    def _occupied(self) -> ReplayError:
        if self._inside == threading.get_ident():
            return ReplayError(
                "a runner was called from inside its own step, or that of a runner with the same pool; "
                "call it after the step has returned"
            )
        other = next((t.name for t in threading.enumerate() if t.ident == self._inside), "another thread")
        return ReplayError(
            f"two threads in one pool of graphs: {threading.current_thread().name} called a runner while {other} was "
            f"in one; give each thread a runner and a pool of its own, or let one wait for the other"
        )


def _stream_name(handle: int) -> str:
    return f"stream {handle:#x}" if handle else "the default stream"
