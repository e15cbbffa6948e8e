"""Rows that decode step after step while nobody comes, goes or ends: what the next step needs, for all rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepgraph.engine.kv_blocks import BLOCK_SIZE, BlockPool
from stepgraph.engine.request import Request

Grown = list[tuple[int, int, int]]
"""(row, index in its block table, block) of blocks added to rows."""


class SteadyRows:
    """Counts the steps for which nothing has to be told to the device, and gives blocks ahead once they are over.

    rows: the requests, `num_rows`; lengths: their tokens, with the one that the last launched step has read and without
    the one it has chosen. pool: of blocks.
    """

    def __init__(self, rows: list[Request], lengths: list[int], pool: BlockPool) -> None:
        self.num_rows = len(rows)
        self._first, self._steps = np.array(lengths, dtype=np.int64), 0  # adding to the array is the dearer count
        self._rows, self._pool = rows, pool
        self._limits = np.array([request.limit for request in rows], dtype=np.int64)
        self._held = np.array([len(request.blocks) for request in rows], dtype=np.int64)
        ended = np.array([request.ended for request in rows], dtype=bool)
        self._going = ~ended & (self._first < self._limits)  # those that the last step gives a token
        self._left = self._count()

    def next(self) -> Grown | None:
        """Go on to the next step. Returns the blocks that it needs, and all rows for a while; None where rows end by
        their length or blocks are short, so that it has to be planned anew."""
        grown: Grown = []
        if not self._left:
            given = self._grow(BLOCK_SIZE)
            if given is None:
                return None
            grown, self._left = given, self._count()
        self.went(1)
        return grown

    def reach(self, steps: int) -> Grown:
        """Blocks for up to so many steps from here, as far as there are any to spare; see `left`."""
        while self._left < steps:
            grown = self._grow(steps)
            if grown is not None:
                self._left = self._count()
                return grown
            if steps <= BLOCK_SIZE:
                break
            steps //= 2
        return []

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """int64 [num_rows], after the steps that were taken."""
        return self._first + self._steps

    @property
    def left(self) -> int:
        """Steps until a row ends by its length or needs a block."""
        return self._left

    def went(self, steps: int) -> None:
        """So many steps were taken, at most `left`."""
        self._left -= steps
        self._steps += steps

    def _count(self) -> int:
        """Steps until a row that goes on ends by its length or needs a block."""
        then = self.lengths + 1
        steps = np.minimum(self._limits - then, self._held * BLOCK_SIZE - self.lengths)[self._going]
        return max(int(steps.min()), 0) if len(steps) else 0

    def _grow(self, steps: int) -> Grown | None:
        """Blocks for so many steps, while there is one left for each row."""
        then = self.lengths + 1
        if not self._going.any() or (then >= self._limits)[self._going].any():
            return None
        tokens = np.minimum(then + steps - 1, self._limits - 1)
        missing = np.where(self._going, -(-tokens // BLOCK_SIZE) - self._held, 0).clip(0)
        if self._pool.num_free < missing.sum() + len(self._rows):
            return None
        rows = np.arange(self.num_rows).repeat(missing).tolist()
        grown: Grown = []
        for row, block in zip(rows, self._pool.take(len(rows)) or (), strict=True):
            blocks = self._rows[row].blocks
            grown.append((row, len(blocks), block))
            blocks.append(block)
        self._held += missing
        return grown
