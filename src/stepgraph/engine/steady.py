"""Rows that decode step after step while nobody comes, goes or ends: what the next step needs, for all rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepgraph.engine.kv_blocks import BLOCK_SIZE, BlockPool
from stepgraph.engine.request import Request

Array = np.ndarray[Any, Any]
Grown = tuple[Array, Array, Array] | tuple[()]
"""Blocks added to rows, int64 [blocks] each: rows, indices in their block tables, blocks."""


class SteadyRows:
    """Counts the steps for which nothing has to be told to the device, and gives blocks ahead once they are over.

    rows: the requests, `num_rows`; lengths: their tokens, with the one that the last launched step has read and without
    the one it has chosen. pool: of blocks.
    """

    def __init__(self, rows: list[Request], lengths: list[int], pool: BlockPool) -> None:
        self.num_rows, self._pool = len(rows), pool
        self._first, self._steps = np.array(lengths, dtype=np.int64), 0  # adding to the array is the dearer count
        self._places, self._blocks = np.arange(self.num_rows), [request.blocks for request in rows]
        self._held = np.array([len(blocks) for blocks in self._blocks], dtype=np.int64)
        ended = np.array([request.ended for request in rows], dtype=bool)
        most = np.array([request.limit - 1 for request in rows], dtype=np.int64)
        going = ~ended & (self._first <= most)  # those that the last step gives a token
        self._most = np.where(going, most, 0)  # tokens that a row needs blocks for; the others need none
        self._end = int((most - self._first)[going].min()) if going.any() else 0  # the step behind which a row ends
        until = (np.minimum(most, self._held * BLOCK_SIZE) - self._first)[going]
        self._left = max(int(until.min()), 0) if going.any() else 0

    def next(self) -> Grown | None:
        """Go on to the next step. Returns the blocks that it needs, and all rows for a while; None where rows end by
        their length or blocks are short, so that it has to be planned anew."""
        grown: Grown | None = ()
        if not self._left:
            grown = self._grow(BLOCK_SIZE)
            if grown is None:
                return None
        self._left -= 1
        self._steps += 1
        return grown

    def reach(self, steps: int) -> Grown:
        """Blocks for up to so many steps from here, as far as there are any to spare; see `left`."""
        while self._left < steps:
            grown = self._grow(steps)
            if grown is not None:
                return grown
            if steps <= BLOCK_SIZE:
                break
            steps //= 2
        return ()

    @property
    def lengths(self) -> Array:
        """int64 [num_rows], after the steps that were taken."""
        return self._first + self._steps

    @property
    def left(self) -> int:
        """Steps until a row ends by its length or needs a block."""
        return self._left

    def went(self, steps: int) -> None:
        """So many steps were taken: at most `left`, and those that the blocks of a loop go on for."""
        self._left = max(self._left - steps, 0)
        self._steps += steps

    def _grow(self, steps: int) -> Grown | None:
        """Blocks for so many steps, while there is one left for each row."""
        if self._steps >= self._end:
            return None
        tokens = np.minimum(self._first + (self._steps + steps), self._most)
        held = np.maximum(-(-tokens // BLOCK_SIZE), self._held)
        missing = held - self._held
        rows = self._places.repeat(missing)
        taken = self._pool.take(len(rows)) if self._pool.num_free >= len(rows) + self.num_rows else None
        if taken is None:
            return None
        indices = (held - missing.cumsum())[rows] + np.arange(len(rows))  # those of one row follow each other
        any(map(list.append, map(self._blocks.__getitem__, rows.tolist()), taken))  # to the last, as each gives None
        self._held, self._left = held, min(steps, self._end - self._steps)
        return rows, indices, np.array(taken, dtype=np.int64)
