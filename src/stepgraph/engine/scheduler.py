"""Which requests run: rows of the decode batch, chunks of prefill, and who gives way when blocks run out."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepgraph.engine.errors import RequestError
from stepgraph.engine.kv_blocks import BlockPool, blocks_for
from stepgraph.engine.request import Request
from stepgraph.runtime.errors import ConfigError

NOTHING_AHEAD: Mapping[Request, int] = MappingProxyType({})
"""Of requests that wait for no token."""


def most_tokens(chunk_tokens: int, max_num_seqs: int) -> int:
    """Tokens of the largest step: `chunk_tokens`, its decoding rows included; where a full batch would leave no room
    for prefill, so many beside the batch.

    Raises:
        ConfigError: `chunk_tokens` below 1.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}; at least one prompt token a step must be computed")
    return chunk_tokens if chunk_tokens > max_num_seqs else chunk_tokens + max_num_seqs


def num_mailboxes(max_num_seqs: int) -> int:
    """Places in which tokens are told."""
    return 2 * max_num_seqs


@dataclass(frozen=True)
class Chunk:
    """Prefill work: a request's positions [start, stop)."""

    request: Request
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.request.num_tokens


class Scheduler:
    """Continuous batching, first come first served.

    Rows 0..n-1 of the decode batch are always occupied: a row that leaves is filled by the last one.
    Every engine step decodes all rows once and prefills what is left of `step_tokens`, so neither starves the other.
    When a decoding request needs a block and none is free, the youngest request gives all of its blocks back and
    waits, to be recomputed later.

    step_tokens: most tokens of a step, one a decoding row and the prefill's; more than `max_num_seqs`.
    changes: goes up whenever a request comes, goes, begins to decode, or ends.

    Where steps are launched before the tokens of earlier ones are known, `ahead` says how many each request waits for.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, step_tokens: int) -> None:
        self.pool = pool
        self.rows: list[Request] = []
        self.waiting: list[Request] = []  # by arrival
        self.prefilling: list[Request] = []  # admitted: hold blocks, not yet decoding
        self.preemptions = 0
        self.changes = 0
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        self._dirty: set[int] = set()
        # Twice as many as there are requests, first in, first out: a step that was launched before its request left
        # may still tell a token, and nobody else's is told there by the next one.
        self._mailboxes = deque(range(num_mailboxes(max_num_seqs)))

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.waiting or self.prefilling)

    def add(self, request: Request) -> None:
        self.changes += 1
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out, wherever it is, and free its blocks."""
        if request in self.rows:
            self._vacate(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free(request)

    def end(self, request: Request) -> None:
        """A token has ended it. It keeps its row until it is removed, and gets no further token."""
        self.changes += 1
        request.ended = True

    def goes_on(self, request: Request, ahead: Mapping[Request, int]) -> bool:
        """Whether a decoding request has another token to come beside those it waits for, as far as is known."""
        return not request.ended and request.num_tokens + ahead.get(request, 0) < request.limit

    def grow(self, ahead: Mapping[Request, int] = NOTHING_AHEAD) -> list[tuple[int, int, int]]:
        """Give every row the block its next token needs, preempting if it must; oldest first.

        Returns (row, index in its block table, block) of blocks added to rows.
        """
        had: dict[Request, int] = {}
        for request in sorted(self.rows, key=lambda r: r.id):
            if request not in self.rows or not self.goes_on(request, ahead):
                continue  # preempted for an older one, or there is no next token
            while len(request.blocks) < blocks_for(request.num_tokens + ahead.get(request, 0)):
                block = self.pool.take(1)
                if block is not None:
                    had.setdefault(request, len(request.blocks))
                    request.blocks += block
                    continue
                victim = max(self.rows + self.prefilling, key=lambda r: r.id)
                self._preempt(victim)
                if victim is request:
                    break
        return [
            (row, index, request.blocks[index])
            for row, request in enumerate(self.rows)
            if request in had
            for index in range(had[request], len(request.blocks))
        ]

    def plan_prefill(self) -> list[Chunk]:
        """This step's prefill, oldest first; admits waiting requests while rows and blocks allow.

        Only the last chunk may leave its request incomplete: it is what the budget ends in.
        """
        chunks: list[Chunk] = []
        budget = self._step_tokens - len(self.rows)
        for request in self.prefilling:
            if budget == 0:
                return chunks
            budget = self._plan(request, budget, chunks)
        while budget and self.waiting and len(self.rows) + len(self.prefilling) < self._max_num_seqs:
            request = self.waiting[0]
            blocks = self.pool.take(blocks_for(request.num_tokens + 1))  # room for the first decoded token too
            if blocks is None:
                break
            request.blocks, request.mailbox = blocks, self._mailboxes.popleft()
            self.prefilling.append(self.waiting.pop(0))
            budget = self._plan(request, budget, chunks)
        return chunks

    def refuse_if_stuck(self) -> None:
        """To be called where nothing could be planned.

        Raises:
            RequestError: a request waits for more blocks than the cache has, and none of them is in use.
        """
        if self.waiting and not self.rows and not self.prefilling:
            needed = blocks_for(self.waiting[0].num_tokens + 1)
            raise RequestError(
                f"request {self.waiting[0].id} needs {needed} KV blocks and the cache has {self.pool.capacity}; "
                f"remove it or give the cache more blocks"
            )

    def join(self, request: Request) -> None:
        """A prefilled request takes the next row, which is where its prefill ran."""
        self.prefilling.remove(request)
        self.rows.append(request)
        self.changes += 1

    def vacate(self, num_blocks: int) -> None:
        """Preempt every request that holds a block from `num_blocks` on: these are free afterwards."""
        for request in [*self.rows, *self.prefilling]:
            if any(block >= num_blocks for block in request.blocks):
                self._preempt(request)

    def take_dirty_rows(self) -> list[int]:
        """Rows that another one's occupant moved to since the last call."""
        dirty = sorted(row for row in self._dirty if row < len(self.rows))
        self._dirty.clear()
        return dirty

    @staticmethod
    def _plan(request: Request, budget: int, chunks: list[Chunk]) -> int:
        stop = min(request.num_tokens, request.computed + budget)
        chunks.append(Chunk(request, request.computed, stop))
        return budget - (stop - request.computed)

    def _preempt(self, request: Request) -> None:
        if request in self.rows:
            self._vacate(request)
        else:
            self.prefilling.remove(request)
        self._free(request)
        request.computed = 0
        self.preemptions += 1
        if not request.ended:  # else there is nothing more to compute
            self.add(request)

    def _vacate(self, request: Request) -> None:
        row = self.rows.index(request)
        last = self.rows.pop()
        if last is not request:
            self.rows[row] = last
            self._dirty.add(row)

    def _free(self, request: Request) -> None:
        self.changes += 1
        request.stint += 1
        if request.blocks:
            self._mailboxes.append(request.mailbox)
        self.pool.give_back(request.blocks)
        request.blocks = []
