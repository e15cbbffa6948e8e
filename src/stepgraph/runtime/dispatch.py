"""From a live batch to the graph that will run it, always with a reason."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.naming import describe

V = TypeVar("V")


class Mode(StrEnum):
    """How one step ran."""

    FULL = "FULL"
    BREAKABLE = "BREAKABLE"
    PIECEWISE = "PIECEWISE"
    EAGER = "EAGER"


class Reason(StrEnum):
    """Why one step ran as it did. A closed set, so that statistics can count it."""

    EXACT = "exact"  # the batch is itself a captured size
    PADDED = "padded"  # padded up to the next captured size
    RELAXED = "relaxed"  # a uniform batch without a key of its own took one of the token count alone
    ABOVE_LADDER = "above_ladder"  # larger than the largest captured size
    PENDING = "pending"  # its rung is captured later, in an idle gap
    SIZE_DROPPED = "size_dropped"  # its rung failed to capture and no larger one is left
    NO_SUCH_KEY = "no_such_key"  # a kind of batch that was never captured
    OVER_PADDED = "over_padded"  # the padding guard
    TOO_MANY_REQUESTS = "too_many_requests"  # more than a prefill graph has request slots
    TOO_MANY_LORAS = "too_many_loras"  # more active adapters than the largest captured case
    DISABLED = "disabled"  # graphs are off for this kind of batch


# Compared by identity: a dispatcher makes one a batch, and counting steps then costs next to nothing.
@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One batch's route: `key` is the captured descriptor, and the batch itself for EAGER.

    parts: what `detail` is put together from once somebody asks: formatting takes longer than a whole dispatch.
    """

    batch: BatchDescriptor
    mode: Mode
    key: BatchDescriptor
    reason: Reason
    parts: tuple[object, ...]

    @property
    def wanted(self) -> BatchDescriptor | None:
        """The key that would run the batch and is still to be captured."""
        return None

    @property
    def detail(self) -> str:
        """The reason with its numbers, and what to change."""
        return "".join(map(str, self.parts))

    @property
    def real(self) -> int:
        """Rows that belong to a request: requests where the key counts requests, else tokens."""
        return self.batch.num_tokens if self.key.query_len is None else (self.batch.num_reqs or 0)

    @property
    def padded(self) -> int:
        """Rows that are computed, in the same unit."""
        return self.key.num_tokens if self.key.query_len is None else (self.key.num_reqs or 0)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Decision):
    """The route of a batch for as long as its own key is still to be captured."""

    pending: BatchDescriptor

    @property
    def wanted(self) -> BatchDescriptor | None:
        return self.pending


MOST_PASSING = 4096
"""Routes of mixed batches that are remembered: there are tokens x requests of them."""


class Dispatcher:
    """Looks batches up: a full key of its own, then the relaxed key of its token count, then eager.

    Answers are remembered: of a uniform batch with a query length of the configuration for good, of the last
    MOST_PASSING others.
    """

    def __init__(
        self,
        config: GraphConfig,
        max_requests: int,
        captured: Mapping[BatchDescriptor, Mode],
        dropped: Mapping[BatchDescriptor, str] | None = None,
        pending: Mapping[BatchDescriptor, Mode] | None = None,
    ) -> None:
        """max_requests: rows that the buffers hold. captured: the keys that have a graph, and how it runs. dropped:
        those that failed to capture, each with why; their batches take the next larger one. pending: those that will
        be captured later; their batches take no larger one."""
        self._config = config
        self._max_requests = max_requests
        slots = config.prefill.max_requests
        self._request_slots = max_requests if slots is None else min(slots, max_requests)
        self._disabled = config.decode.backend is Backend.DISABLED and config.prefill.backend is Backend.DISABLED
        self._rungs = _rungs(captured)
        self._lost = _rungs(dropped or {})
        self._pending = _rungs(pending or {})
        self._decisions: dict[BatchDescriptor, Decision] = {}
        self._passing: deque[BatchDescriptor] = deque()

    def dispatch(self, batch: BatchDescriptor) -> Decision:
        """The route of a live batch.

        Raises:
            ValueError: a key in place of a batch: a live batch has requests.
        """
        decision = self._decisions.get(batch)
        if decision is None:
            decision = self._decisions[batch] = self._decide(batch)
            if batch.query_len not in self._config.decode.query_lens:
                self._passing.append(batch)
                if len(self._passing) > MOST_PASSING:
                    del self._decisions[self._passing.popleft()]
        return decision

    def coverage(self, max_requests: int, query_len: int = 1) -> list[Decision]:
        """The route of every uniform batch from 1 to `max_requests` requests."""
        return [self.dispatch(BatchDescriptor.decode(rows, query_len)) for rows in range(1, max_requests + 1)]

    def coverage_mixed(self, max_tokens: int) -> list[Decision]:
        """The route of every mixed batch from 1 to `max_tokens` tokens of one request."""
        return [self.dispatch(BatchDescriptor.mixed(tokens, 1)) for tokens in range(1, max_tokens + 1)]

    def _decide(self, batch: BatchDescriptor) -> Decision:
        if batch.num_reqs is None:
            raise ValueError(f"{batch} is a key; a live batch says how many requests it has")
        if self._disabled:
            return _eager(batch, Reason.DISABLED, "graphs are disabled")
        if not self._rungs and not self._lost and not self._pending:
            return _eager(batch, Reason.NO_SUCH_KEY, "nothing is captured yet; call capture()")
        cases = self._config.lora_cases
        place = bisect_left(cases, batch.num_loras)
        if place == len(cases):
            told = (batch.num_loras, " active adapters; the largest captured case has ", cases[-1])
            return _eager(batch, Reason.TOO_MANY_LORAS, *told, "; add one to lora_cases")
        case = cases[place]
        if batch.query_len is None:
            return self._relaxed(batch, case)
        full = self._full(batch, case)
        if full.mode is not Mode.EAGER:
            return full
        relaxed = self._relaxed(batch, case)
        if relaxed.mode is not Mode.EAGER:
            route = (batch, relaxed.mode, relaxed.key, Reason.RELAXED, (*full.parts, "; ", *relaxed.parts))
            return Decision(*route) if full.wanted is None else Waiting(*route, full.wanted)
        # Of the two misses the one to mend: the full key's, unless this kind of batch was never to have one.
        unwanted = full.reason in (Reason.DISABLED, Reason.NO_SUCH_KEY) and relaxed.reason is not Reason.DISABLED
        return relaxed if unwanted else full

    def _full(self, batch: BatchDescriptor, case: int) -> Decision:
        """By requests and query length."""
        if self._config.decode.backend is Backend.DISABLED:
            return _eager(batch, Reason.DISABLED, "graphs are disabled for uniform batches")
        if batch.query_len not in self._config.decode.query_lens:
            told = (batch.query_len, " tokens a request; add ", batch.query_len, " to decode.query_lens to capture it")
            return _eager(batch, Reason.NO_SUCH_KEY, *told)
        rows = batch.num_reqs or 0
        rung = _at_least(self._rungs, (batch.query_len, case), rows)
        if self._pending and (waits := self._waits(batch, (batch.query_len, case), rows, rung)) is not None:
            return waits
        if rung is None:
            return self._off(batch, (batch.query_len, case), rows, "requests")
        key, mode = rung
        reason = Reason.EXACT if key.num_reqs == rows else Reason.PADDED
        return Decision(batch, mode, key, reason, (rows, " → ", key.num_reqs))

    def _relaxed(self, batch: BatchDescriptor, case: int) -> Decision:
        """By the token count alone."""
        prefill, tokens = self._config.prefill, batch.num_tokens
        if prefill.backend is Backend.DISABLED:
            return _eager(batch, Reason.DISABLED, "graphs are disabled for mixed batches")
        if (batch.num_reqs or 0) > self._request_slots:
            told = (batch.num_reqs, " requests; a prefill graph has ", self._request_slots, " request slots")
            return _eager(batch, Reason.TOO_MANY_REQUESTS, *told, "; raise prefill.max_requests")
        rung = _at_least(self._rungs, (None, case), tokens)
        if self._pending and (waits := self._waits(batch, (None, case), tokens, rung)) is not None:
            return waits
        if rung is None:
            return self._off(batch, (None, case), tokens, "tokens")
        key, mode = rung
        padded = key.num_tokens
        if padded > prefill.pad_factor * tokens and padded > prefill.pad_floor:
            much = (tokens, " tokens would be padded to ", padded, ", more than ", f"{prefill.pad_factor:g}", " times")
            advice = "; capture a size between them, or raise prefill.pad_factor"
            return _eager(batch, Reason.OVER_PADDED, *much, advice)
        reason = Reason.EXACT if padded == tokens else Reason.PADDED
        return Decision(batch, mode, key, reason, (tokens, " → ", padded, " tokens"))

    def _waits(
        self, batch: BatchDescriptor, family: _Family, size: int, captured: tuple[BatchDescriptor, Mode] | None
    ) -> Decision | None:
        """The decision on a batch whose own key is still to be captured; None where it is not so."""
        found = _at_least(self._pending, family, size)
        if found is None or (captured is not None and captured[0].num_tokens <= found[0].num_tokens):
            return None
        parts = ("the graph of ", describe(found[0]), " is captured later; capture_pending() does it")
        return Waiting(batch, Mode.EAGER, batch, Reason.PENDING, parts, found[0])

    def _off(self, batch: BatchDescriptor, family: _Family, size: int, unit: str) -> Decision:
        """Why no captured size of a family holds `size`."""
        lost = _at_least(self._lost, family, size)
        if lost is not None:
            key, why = lost
            size = key.num_tokens if key.num_reqs is None else key.num_reqs
            return _eager(batch, Reason.SIZE_DROPPED, "size ", size, " of ", unit, " is dropped: ", why)
        sizes = [known[family][0][-1] for known in (self._rungs, self._lost) if family in known]
        if not sizes:
            return _eager(batch, Reason.NO_SUCH_KEY, "no size is captured for this kind of batch")
        told = (size, " ", unit, "; the largest size of the ladder is ", max(sizes))
        return _eager(batch, Reason.ABOVE_LADDER, *told, "; capture a size of at least ", size)


_Family = tuple[int | None, int]
"""A query length (None: relaxed) and a LoRA case."""

_Rungs = dict[_Family, tuple[list[int], list[tuple[BatchDescriptor, V]]]]
"""Sizes, ascending, in requests or in tokens; and for each its key and what is known of that."""


def _rungs(keys: Mapping[BatchDescriptor, V]) -> _Rungs[V]:
    families: _Rungs[V] = {}
    for key, value in sorted(keys.items(), key=lambda item: item[0].num_tokens):
        sizes, rungs = families.setdefault((key.query_len, key.num_loras), ([], []))
        sizes.append(key.num_tokens if key.num_reqs is None else key.num_reqs)
        rungs.append((key, value))
    return families


def _at_least(rungs: _Rungs[V], family: _Family, size: int) -> tuple[BatchDescriptor, V] | None:
    if family not in rungs:
        return None
    sizes, members = rungs[family]
    place = bisect_left(sizes, size)
    return members[place] if place < len(sizes) else None


def _eager(batch: BatchDescriptor, reason: Reason, *parts: object) -> Decision:
    return Decision(batch, Mode.EAGER, batch, reason, parts)
