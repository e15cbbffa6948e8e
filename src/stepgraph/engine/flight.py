"""Steps that were launched and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch

from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import Scheduler
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.platforms.base import Mark


class Produced(Sequence[tuple[Request, int]]):
    """Requests with their next token each, by row; of several steps, step by step. Pairs are made when they are asked
    for: in a list they take as long as all else that is done with a token, and set the garbage collector going.

    requests: of each of the steps. tokens: of all of them.
    """

    __slots__ = ("_tokens", "requests")

    def __init__(self, requests: list[Request], tokens: list[int]) -> None:
        self.requests, self._tokens = requests, tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        return zip(cycle(self.requests), self._tokens, strict=False)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def then(self, later: Produced) -> Produced:
        """With what the step behind has produced. Both are of one step."""
        assert len(self) == len(self.requests) and len(later) == len(later.requests), "tokens of several steps"
        if not self._tokens or not later._tokens:
            return self if self._tokens else later
        return Produced(self.requests + later.requests, self._tokens + later._tokens)


_MOST = 2  # launched before the first of them is read
_LINES = 4  # of a mailbox, at least, for tokens of successive steps: a later one writes none that is still to be read


class Takers:
    """Whom steps give a token each, unless they have lost their row or ended since.

    takers: requests, and the positions in their texts of the tokens that the first step gives. lines: of a mailbox.
    """

    def __init__(self, takers: Mapping[Request, int], lines: int) -> None:
        self.requests = list(takers)
        self.outputs = [request.output for request in takers]  # which are added to
        self.stints = [request.stint for request in takers]
        self.positions = list(takers.values())
        self._mailboxes = np.array([request.mailbox for request in takers], dtype=np.int64) * lines
        self._positions, self._lines = np.array(self.positions, dtype=np.int64), lines
        self._known: dict[int, np.ndarray[Any, Any]] = {}

    def places(self, step: int) -> np.ndarray[Any, Any]:
        """int64 [requests]: where in `told` the tokens of a step are, counted from the first. Mailboxes go round."""
        line = step % self._lines
        known = self._known.get(line)
        if known is None:
            known = self._known[line] = self.places_of(range(line, line + 1))[0]
        return known

    def places_of(self, steps: range) -> np.ndarray[Any, Any]:
        """int64 [steps, requests], of as many steps as a mailbox has lines, at most."""
        return self._mailboxes + (self._positions + np.arange(steps.start, steps.stop)[:, None]) % self._lines


Flight = tuple[Takers, int, int, Mark]
"""A step: its takers, how many steps it is since their first, the scheduler's changes, and the mark behind it. While
the changes are the same, nobody has left."""


class Flights:
    """At most two steps on their way, in order, and the memory that they tell their tokens in.

    told: for the step; see `ops.advance`. under_way: the oldest first.
    mailboxes: places in which tokens are told. most: steps of a loop.
    check: called once a step is over and before its tokens are taken; raises where they must not be.
    """

    def __init__(
        self,
        platform: Platform,
        scheduler: Scheduler,
        mailboxes: int,
        most: int = 1,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._lines = max(_LINES, most)
        self.told, host = platform.shared((mailboxes, self._lines), torch.int64)
        self._told = host.numpy().reshape(-1)
        self._scheduler, self._check = scheduler, check
        self.under_way: deque[Flight] = deque()
        self._takers, self._step, self._changes = Takers({}, self._lines), 0, 0  # of the last one, read or not
        self._torn = False  # an interrupt came while the oldest was read: some requests may have its tokens
        self._marks = cycle([platform.mark() for _ in range(_MOST)])

    def ahead(self) -> Mapping[Request, int]:
        """How many tokens each request waits for."""
        counts: dict[Request, int] = {}
        for takers, *_ in self.under_way:
            for request, stint in zip(takers.requests, takers.stints, strict=True):
                if request.stint == stint:
                    counts[request] = counts.get(request, 0) + 1
        return counts

    def launched(self, takers: Mapping[Request, int]) -> None:
        """A step was launched. takers: as for `Takers`."""
        self._takers, self._step, self._changes = Takers(takers, self._lines), -1, self._scheduler.changes
        self.launched_again()

    def launched_again(self) -> None:
        """A step like the last one was launched: a token further for everybody."""
        self._step += 1
        mark = next(self._marks)
        mark.set()
        self.under_way.append((self._takers, self._step, self._changes, mark))

    def read(self) -> Produced:
        """The tokens of the oldest step, which the host waits for. They are put to the requests' outputs."""
        takers, step, changes, mark = self.under_way[0]
        mark.wait()
        if self._check is not None:
            self._check()
        told = self._told.take(takers.places(step))
        torn, self._torn = self._torn, True
        produced = self._read_some(takers, step, told.tolist()) if torn else self._take(takers, step, changes, told)
        self.under_way.popleft()
        self._torn = False
        return produced

    def read_loop(self, steps: int) -> Produced:
        """The tokens of so many steps like the last one, all over; no other is on its way. Only in the last of them a
        request may have ended."""
        assert not self.under_way, "read what is under way first"
        takers, last = self._takers, self._step
        told = self._told.take(takers.places_of(range(last + 1, last + 1 + steps)))
        for output, tokens in zip(takers.outputs, told[:-1].T.tolist(), strict=True):
            output.extend(tokens)
        ends = self._take(takers, last + steps, self._changes, told[-1])
        self._step = last + steps
        return Produced(takers.requests, told[:-1].ravel().tolist() + [token for _, token in ends])

    def _take(self, takers: Takers, step: int, changes: int, told: np.ndarray[Any, Any]) -> Produced:
        tokens = told.tolist()
        if changes != self._scheduler.changes or (tokens and tokens[told.argmin()] < 0):  # a fraction of `min`'s time
            return self._read_some(takers, step, tokens)
        any(map(list.append, takers.outputs, tokens))  # to the last, as each gives None; half the time of a loop
        return Produced(takers.requests, tokens)

    def _read_some(self, takers: Takers, step: int, tokens: list[int]) -> Produced:
        """The tokens of those who are where they were; some may end."""
        requests: list[Request] = []
        given: list[int] = []
        known = zip(takers.requests, takers.stints, takers.positions, tokens, strict=True)
        for request, stint, position, told in known:
            if request.stint != stint or request.ended:
                continue
            if request.num_tokens == position + step:  # else it was taken in before an interrupt
                token = told if told >= 0 else ~told
                request.output.append(token)
                requests.append(request)
                given.append(token)
            if told < 0:
                self._scheduler.end(request)
        return Produced(requests, given)
