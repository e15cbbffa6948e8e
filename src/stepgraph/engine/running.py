"""The requests that run: each step's tokens go to their texts, and who has ended leaves."""

from __future__ import annotations

from stepgraph.engine.core import EngineCore
from stepgraph.engine.tracked import TrackedRequest

_TURNS = 16
"""Texts that nobody hears and no token has ended are caught up with in turns: one of so many rows a step."""


class Running:
    """Steps the engine for requests of several calls, whoever of them asks for it."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._tracked: dict[int, TrackedRequest] = {}  # by id
        self._heard: set[int] = set()  # of those
        self._turn = 0
        self._in_step = False
        self._to_abort: list[int] = []  # once the step that is under way is over

    def add(self, one: TrackedRequest) -> None:
        """Queue it."""
        self._tracked[one.request.id] = one
        if one.heard:
            self._heard.add(one.request.id)
        self._core.scheduler.add(one.request)

    def abort(self, id: int) -> None:
        """End a request with reason `abort`. Unknown or finished ones are ignored."""
        if self._in_step:  # a stream was let go of, and collected in the middle of another one's step
            self._to_abort.append(id)
            return
        one = self._tracked.get(id)
        if one is not None:
            one.catch_up()
            one.request.finish_reason = "abort"
            self._remove(one)

    def step(self) -> None:
        """Launch a step and take in the tokens of the one before, or those of many steps; all of them before any is
        told, so that a caller may call again meanwhile."""
        self._in_step = True
        try:
            core, changes = self._core, self._core.scheduler.changes
            produced = core.step_ahead() if core.steps_per_launch == 1 else core.step_many()
            if not produced.requests:  # a step that was interrupted may have had tokens
                self._catch_up(list(self._tracked))
            elif self._heard or core.scheduler.changes != changes:
                self._catch_up([request.id for request in produced.requests])
            else:  # then none has ended
                self._turn = (self._turn + 1) % _TURNS
                for request in produced.requests[self._turn :: _TURNS]:
                    self._tracked[request.id].go_on()
        finally:
            self._in_step = False
            while self._to_abort:
                self.abort(self._to_abort.pop())

    def _catch_up(self, ids: list[int]) -> None:
        """Those that have ended leave."""
        for id in ids:
            one = self._tracked.get(id)
            if one is None:
                continue
            one.catch_up()
            if one.finished:
                self._remove(one)

    def _remove(self, one: TrackedRequest) -> None:
        self._core.scheduler.remove(one.request)
        self._heard.discard(one.request.id)
        del self._tracked[one.request.id]
