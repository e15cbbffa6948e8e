"""The sizes that make a histogram's steps shortest: a dynamic programme over integers, and the proof of its cost.

A step of b rows takes the time of the smallest captured size that holds it. With W(j) the steps of at most j rows and
t(j) the time of size j, sizes s1 < … < sK cost the sum of (W(s) - W(s')) · t(s), s' the size below s. So the best K
sizes are the shortest path of at most K arcs from 0 to the maximum; an arc from i to j costs (W(j) - W(i)) · t(j).
Nothing is asked of t: it may fall, and a size may then be worth its place though no step has so many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepgraph.runtime.errors import ConfigError

UNREACHED = 2**61
"""Above every cost; twice as much is no overflow yet."""

MOST_ROWS = 4096
"""The programme holds the cost of every arc: 128 MiB here, and four times that for twice as many rows."""

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Optima:
    """The best ladders of every number of sizes.

    potentials: row k, column j: least cost of the steps of at most j rows with at most k sizes, the last of them j.
    Row 0 is no size at all. Rows end where a further size would gain nothing. arcs: the size below, in that optimum.
    costs: of the arc to row from column. In steps times the times' unit.
    """

    potentials: Integers
    arcs: Integers
    costs: Integers

    @property
    def most(self) -> int:
        """The number of sizes beyond which nothing is gained."""
        return len(self.potentials) - 1

    def cost(self, sizes: int) -> int:
        """Of the best ladder of at most so many sizes."""
        return int(self.potentials[self._row(sizes), -1])

    def ladder(self, sizes: int) -> tuple[int, ...]:
        """Its sizes, ascending; the last is the maximum. Fewer than asked for where more gain nothing."""
        row, size = self._row(sizes), self.potentials.shape[1] - 1
        found = []
        while size:
            while self.potentials[row - 1, size] == self.potentials[row, size]:
                row -= 1  # as good with one size less
            found.append(size)
            row, size = row - 1, int(self.arcs[row, size])
        return tuple(reversed(found))

    def prove(self, sizes: int) -> int:
        """The number of arcs that were checked.

        Each potential is at most that of another size with one size less and the arc between them. Summed along any
        ladder of at most so many sizes, this says that it costs at least the last potential.

        Raises:
            AssertionError: an arc undercuts a potential, so that the cost is not proven.
        """
        last = self._row(sizes)
        start = np.full(self.potentials.shape[1], UNREACHED)
        start[0] = 0
        if (self.potentials[0] != start).any():
            raise AssertionError("a cost without any size")
        for row in range(1, last + 1):
            below = self.potentials[row - 1]
            undercut = (below + self.costs < self.potentials[row][:, None]).any() or (
                below < self.potentials[row]
            ).any()
            if undercut:
                raise AssertionError(f"a ladder of {row} sizes costs less than its potential")
        return last * int((self.costs < UNREACHED).sum())

    def _row(self, sizes: int) -> int:
        if sizes < 1:
            raise ConfigError(f"ladder: {sizes} sizes; a ladder has at least one")
        return min(sizes, self.most)


def best_ladders(steps: Integers, times: Integers, most: int) -> Optima:
    """The optima of 1 to `most` sizes.

    steps: by number of rows, from 0 (no step has none) to the maximum. times: of a step of a captured size, likewise.

    Raises:
        ConfigError: no steps, too many rows, times that are not positive, or a total that an integer of 64 bits cannot
            hold.
    """
    largest = len(times) - 1
    if largest > MOST_ROWS:
        raise ConfigError(f"ladder: {largest} rows; sizes are fitted up to {MOST_ROWS}; name fewer with --max-rows")
    if len(steps) != len(times) or largest < 1 or steps[0] or (steps < 0).any() or not steps.any():
        raise ConfigError("ladder: a histogram has steps of at least one row, and of no more rows than the maximum")
    if most < 1:
        raise ConfigError(f"ladder: {most} sizes; a ladder has at least one")
    if (times[1:] <= 0).any():
        raise ConfigError("ladder: step times must be positive")
    if int(steps.sum()) * int(times.max()) >= UNREACHED:
        raise ConfigError("ladder: too many steps to add their times up; divide them all by the same number")
    below = np.cumsum(steps)
    costs = (below[:, None] - below) * times[:, None]
    costs[np.triu_indices(largest + 1)] = UNREACHED
    row = np.full(largest + 1, UNREACHED)
    row[0] = 0
    rows, arcs = [row], [np.zeros(largest + 1, dtype=np.int64)]
    while len(rows) <= most:
        ways = row + costs
        arc = ways.argmin(axis=1)
        row = np.minimum(row, ways[np.arange(largest + 1), arc])
        if (row == rows[-1]).all():
            break
        rows.append(row)
        arcs.append(arc)
    return Optima(np.stack(rows), np.stack(arcs), costs)
