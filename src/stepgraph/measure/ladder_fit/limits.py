"""How many sizes a budget has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST


@dataclass(frozen=True)
class Limits:
    """What the sizes may take together, and what one of them takes; None where nothing is said.

    Sizes share one pool, which the largest shapes, and the largest is in every ladder. What a list of sizes takes is
    therefore so much for each (`stepgraph memory` shows it), and a budget is a number of sizes.
    """

    sizes: int
    mib: float | None = None
    seconds: float | None = None
    mib_a_size: float | None = None
    seconds_a_size: float | None = None

    def most(self) -> int:
        """Raises ConfigError: there is room for none, or a budget without what a size takes."""
        room = [self.sizes]
        for name, budget, each in (
            ("mib", self.mib, self.mib_a_size),
            ("seconds", self.seconds, self.seconds_a_size),
        ):
            if budget is None:
                continue
            if each is None or not 0 < each < math.inf:
                raise ConfigError(f"limit: --max-{name} needs --{name}-a-size, above 0: what one size takes")
            if math.isnan(budget):
                raise ConfigError(f"limit: --max-{name} is no number")
            room.append(int(min(budget / each, LARGEST) + 1e-9))
        if min(room) < 1:
            raise ConfigError("limit: there is room for no size at all; a ladder has at least one")
        return min(room)
