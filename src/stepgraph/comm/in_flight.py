"""One operation in flight on a communicator: its protocol has one set of flags and slots. Enforced, not hoped for."""

from __future__ import annotations

import threading

import torch

from stepgraph.comm.errors import CommError


class OneInFlight:
    """Around each operation of a communicator, on the stream that it is launched on.

    Eagerly, an operation on another stream waits for the last one, on the device. In a capture that cannot be mended
    behind the caller's back, so there it raises. Captures that follow each other may be on different streams: `begin`
    each. Between replays and eager steps the graphs' pool keeps the order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self._captured_on: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """A capture begins."""
        self._captured_on = None

    def enter(self, *, capturing: bool) -> None:
        """Raises CommError: another thread is in an operation, or a capture has one on another stream."""
        if not self._lock.acquire(blocking=False):
            raise CommError("two threads in collectives of one communicator at once; one operation may be in flight")
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if capturing:
            if self._captured_on is not None and self._captured_on != stream:
                self._lock.release()
                raise CommError(
                    "collectives of one communicator on two streams of a capture: a replay could have both in flight, "
                    "which deadlocks; launch them on one stream"
                )
            self._captured_on = stream
            return
        self._captured_on = None
        if self._done is not None and self._stream != stream:
            stream.wait_event(self._done)

    def leave(self, *, capturing: bool) -> None:
        try:
            if self._device.type == "cuda" and not capturing:
                self._stream = torch.cuda.current_stream(self._device)
                self._done = self._done or torch.cuda.Event()
                self._done.record(self._stream)
        finally:
            self._lock.release()
