"""Steps that were launched and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import Scheduler
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.platforms.base import Mark

Produced = list[tuple[Request, int]]
"""Requests with their next token each, by row."""

_MOST = 2  # launched before the first of them is read
_LINES = 4  # of a row, for tokens of successive steps: a later step writes none that is still to be read


class Flight(NamedTuple):
    """One step. requests: those that it gives a token, unless they have lost their row or ended since.

    rows, places: int64 [requests], where each stands, and the position of its token in its text.
    stints: each request's. changes: the scheduler's; while it is the same, nobody has left.
    """

    requests: list[Request]
    stints: list[int]
    rows: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]
    changes: int
    mark: Mark

    @classmethod
    def of(cls, takers: Sequence[tuple[Request, int, int]], changes: int, mark: Mark) -> Flight:
        """takers: requests, rows and places."""
        rows, places = np.array([taker[1:] for taker in takers], dtype=np.int64).reshape(-1, 2).T
        requests = [request for request, _, _ in takers]
        return cls(requests, [request.stint for request in requests], rows, places, changes, mark)


class Flights:
    """At most two steps on their way, in order, and the memory that they tell their tokens in.

    told, halt: for the step; see `ops.advance`. max_requests: rows.
    """

    def __init__(self, platform: Platform, scheduler: Scheduler, max_requests: int) -> None:
        self.told, host = platform.shared((max_requests, _LINES), torch.int64)
        self.halt = torch.zeros(1, dtype=torch.int32, device=platform.device)
        self._told = host.numpy()
        self._scheduler = scheduler
        self._flights: deque[Flight] = deque()
        self._last: Flight | None = None  # launched, read or not
        self._marks = deque(platform.mark() for _ in range(_MOST))

    def __len__(self) -> int:
        return len(self._flights)

    def ahead(self) -> Mapping[Request, int]:
        """How many tokens each request waits for."""
        counts: dict[Request, int] = {}
        for flight in self._flights:
            for request, stint in zip(flight.requests, flight.stints, strict=True):
                if request.stint == stint:
                    counts[request] = counts.get(request, 0) + 1
        return counts

    def launched(self, takers: Sequence[tuple[Request, int, int]]) -> None:
        """A step was launched, for these requests, rows and places."""
        self._last = Flight.of(takers, self._scheduler.changes, self._next_mark())
        self._flights.append(self._last)

    def launched_again(self) -> None:
        """A step like the last one was launched: a token further for everybody."""
        assert self._last is not None, "a step like which?"
        self._last = self._last._replace(places=self._last.places + 1, mark=self._next_mark())
        self._flights.append(self._last)

    def read(self) -> Produced:
        """The tokens of the oldest step, which the host waits for. They are put to the requests' outputs."""
        flight = self._flights[0]
        flight.mark.wait()
        values = self._told[flight.rows, flight.places % _LINES]
        ended = values < 0
        tokens = np.where(ended, ~values, values).tolist() if (some_end := ended.any()) else values.tolist()
        self._flights.popleft()
        requests = flight.requests
        if some_end or flight.changes != self._scheduler.changes:
            return self._read_some(flight, tokens, ended.tolist())
        for request, token in zip(requests, tokens, strict=True):
            request.output.append(token)
        return list(zip(requests, tokens, strict=True))

    def _read_some(self, flight: Flight, tokens: list[int], ended: list[bool]) -> Produced:
        """The tokens of those who are where they were."""
        produced: Produced = []
        for request, stint, token, ends in zip(flight.requests, flight.stints, tokens, ended, strict=True):
            if request.stint == stint and not request.ended:
                request.output.append(token)
                produced.append((request, token))
                if ends:
                    self._scheduler.end(request)
        return produced

    def _next_mark(self) -> Mark:
        mark = self._marks[0]
        self._marks.rotate(-1)
        mark.set()
        return mark
