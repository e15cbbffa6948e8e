"""From a live batch to the graph that will run it, always with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import GraphConfig


class Mode(StrEnum):
    """How one step ran."""

    FULL = "FULL"
    BREAKABLE = "BREAKABLE"
    EAGER = "EAGER"


class Reason(StrEnum):
    """Why one step ran as it did. A closed set, so that statistics can count it."""

    EXACT = "exact"  # the batch is itself a captured size
    PADDED = "padded"  # padded up to the next captured size
    RELAXED = "relaxed"  # a uniform batch without a key of its own took one of the token count alone
    ABOVE_LADDER = "above_ladder"  # larger than the largest captured size
    SIZE_DROPPED = "size_dropped"  # its rung failed to capture and no larger one is left
    NO_SUCH_KEY = "no_such_key"  # a kind of batch that was never captured
    OVER_PADDED = "over_padded"  # the padding guard
    TOO_MANY_REQUESTS = "too_many_requests"  # more than a prefill graph has request slots
    TOO_MANY_LORAS = "too_many_loras"  # more active adapters than the largest captured case
    DISABLED = "disabled"  # graphs are off for this kind of batch


# Compared by identity: a dispatcher makes one a batch, and counting steps then costs next to nothing.
@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One batch's route: `key` is the captured descriptor, and the batch itself for EAGER."""

    batch: BatchDescriptor
    mode: Mode
    key: BatchDescriptor
    reason: Reason
    detail: str

    @property
    def real(self) -> int:
        """Rows that belong to a request: requests where the key counts requests, else tokens."""
        return self.batch.num_tokens if self.key.query_len is None else (self.batch.num_reqs or 0)

    @property
    def padded(self) -> int:
        """Rows that are computed, in the same unit."""
        return self.key.num_tokens if self.key.query_len is None else (self.key.num_reqs or 0)


class Dispatcher:
    """TODO (helper A). Full key, then the relaxed key (token count alone), then eager."""

    def __init__(
        self,
        config: GraphConfig,
        max_requests: int,
        captured: Mapping[BatchDescriptor, Mode],
        dropped: Mapping[BatchDescriptor, str] | None = None,
    ) -> None: ...

    def dispatch(self, batch: BatchDescriptor) -> Decision: ...

    def coverage(self, max_requests: int, query_len: int = 1) -> list[Decision]:
        """The route of every uniform batch from 1 to `max_requests` requests."""

    def coverage_mixed(self, max_tokens: int) -> list[Decision]:
        """The route of every mixed batch from 1 to `max_tokens` tokens of one request."""


def cliffs(coverage: Iterable[Decision]) -> list[str]: ...
