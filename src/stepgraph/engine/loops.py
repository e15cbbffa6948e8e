"""Many steps a launch: when the engine may have the device run on by itself, and why it does not."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from stepgraph.engine.request import Request
from stepgraph.ops.attention import AttentionBackend
from stepgraph.runtime.errors import CaptureError, ConfigError
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.runner import GraphRunner

StepsPerLaunch = int | Literal["auto"]
AUTO = 1024
"""Tokens of a launch, at least, where nobody waits for single ones. A launch takes the host some 0.7 ms, however many
steps it has: under 1 µs a token then."""
MOST = 4096
"""Steps of a launch: each has a place in pinned memory, of twice as many requests as there may be."""
_FEWEST = 256

_ONE_BY_ONE = "stop strings, many stop tokens or streaming"
_log = logging.getLogger(__name__)


def most_steps(asked: object) -> int:
    """Of a launch, at most.

    Raises:
        ConfigError: neither `auto` nor a whole number from 1 to MOST.
    """
    if asked == "auto":
        return AUTO
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= MOST:
        raise ConfigError(f"steps_per_launch is {asked!r:.80}; it is a whole number from 1 to {MOST}, or 'auto'")
    return asked


def steps_ahead(most: int, rows: int) -> int:
    """Steps that so many rows are given blocks for before a launch of up to `most`: more of them where rows are few,
    and else no more than is worth it, since nobody can join meanwhile, or have the blocks."""
    return min(most, max(_FEWEST, AUTO // rows))


class Loops:
    """Launches of up to `most` steps, which end early where a row ends or needs a block.

    impossible: why there can be none, if so.
    Where there can be none, steps are launched one by one, and `stats.not_looped` and the log say why.
    """

    def __init__(self, platform: Platform, most: int, attention: AttentionBackend) -> None:
        self.terms = LoopTerms.on(platform, most)
        self._mark = platform.mark(asleep=True)
        self.impossible = "attention prepares each step on the host" if attention.plans_each_step else ""
        self._told: set[str] = set()

    def prepare(self, runner: GraphRunner) -> None:
        """Once graphs are captured."""
        if self.terms.most > 1 and not self.impossible:
            try:
                runner.prepare_loops(self.terms)
            except (CaptureError, torch.OutOfMemoryError) as error:
                self.impossible = str(error)

    def may_run(self, runner: GraphRunner, rows: list[Request]) -> bool:
        """Whether these rows may run on by themselves."""
        if self.terms.most == 1:
            return False
        if self.impossible:
            self._not_looped(runner, self.impossible)
        elif any(request.one_by_one for request in rows):
            runner.stats.not_looped[_ONE_BY_ONE] += 1  # as asked for
        else:
            return True
        return False

    def run(self, runner: GraphRunner, rows: int, num_loras: int) -> int:
        """Run, asleep, until the device halts. Returns how many steps it took, 0 where it cannot."""
        try:
            decision = runner.loop(self.terms, num_requests=rows, num_loras=num_loras)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._not_looped(runner, str(error))
            return 0
        self._mark.set()
        self._mark.wait()
        steps = int(self.terms.told)
        runner.stats.looped(decision, steps)
        return steps

    def _not_looped(self, runner: GraphRunner, reason: str) -> None:
        runner.stats.not_looped[reason] += 1
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("one step a launch: %s", reason)
