"""From a live batch to the graph that will run it, always with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.ladder import Ladder


class Mode(StrEnum):
    """How one step ran."""

    FULL = "FULL"
    EAGER = "EAGER"


class Reason(StrEnum):
    """Why one step ran as it did. A closed set, so that statistics can count it."""

    EXACT = "exact"  # the batch is itself a captured size
    PADDED = "padded"  # padded up to the next captured size
    ABOVE_LADDER = "above_ladder"  # more requests than the largest captured size
    SIZE_DROPPED = "size_dropped"  # its rung failed to capture and no larger one is left
    NO_SUCH_KEY = "no_such_key"  # a query length or LoRA count that was never captured
    DISABLED = "disabled"  # graphs are off


# Compared by identity: a dispatcher makes one a batch, and counting steps then costs next to nothing.
@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One batch's route: `key` is the captured descriptor for FULL and the batch itself for EAGER."""

    batch: BatchDescriptor
    mode: Mode
    key: BatchDescriptor
    reason: Reason
    detail: str

    @property
    def real(self) -> int:
        """Rows that belong to a request (tokens where the batch is not uniform)."""
        return self.batch.num_reqs or self.batch.num_tokens

    @property
    def padded(self) -> int:
        """Rows that are computed."""
        return self.key.num_reqs or self.key.num_tokens


def cliffs(coverage: Iterable[Decision]) -> list[str]:
    """Runs of neighbouring batch sizes that fall off the ladder, each as a sentence that says what to change."""
    runs: list[tuple[int, int, Reason]] = []
    for decision in coverage:
        if decision.mode is not Mode.EAGER or decision.reason is Reason.DISABLED:
            continue
        if runs and runs[-1][1] == decision.real - 1 and runs[-1][2] is decision.reason:
            runs[-1] = (runs[-1][0], decision.real, decision.reason)
        else:
            runs.append((decision.real, decision.real, decision.reason))
    return [
        f"batches of {first} to {last} requests run eagerly ({reason}); capture a size of at least {last}"
        for first, last, reason in runs
    ]


class Dispatcher:
    """Looks batches up among the captured keys. Every answer is computed once and remembered."""

    def __init__(
        self, ladder: Ladder | None, captured: Iterable[BatchDescriptor], dropped: Mapping[int, str] | None = None
    ) -> None:
        """`dropped` maps a size, in requests, that failed to capture to its reason."""
        self._ladder = ladder
        self._captured = frozenset(captured)
        self._dropped = dict(dropped or {})
        self._decisions: dict[BatchDescriptor, Decision] = {}

    def dispatch(self, batch: BatchDescriptor) -> Decision:
        decision = self._decisions.get(batch)
        if decision is None:
            decision = self._decisions[batch] = self._decide(batch)
        return decision

    def coverage(self, max_reqs: int) -> list[Decision]:
        """The route of every plain decode batch from 1 to `max_reqs` rows."""
        return [self.dispatch(BatchDescriptor.decode(n)) for n in range(1, max_reqs + 1)]

    def _decide(self, batch: BatchDescriptor) -> Decision:
        if self._ladder is None:
            return Decision(batch, Mode.EAGER, batch, Reason.DISABLED, "graphs are disabled")
        if batch.num_reqs is None:
            return Decision(batch, Mode.EAGER, batch, Reason.NO_SUCH_KEY, "the batch is not uniform")
        if batch.num_reqs > self._ladder.max_size:
            detail = f"{batch.num_reqs} requests; the largest captured size is {self._ladder.max_size}"
            return Decision(batch, Mode.EAGER, batch, Reason.ABOVE_LADDER, detail)
        fitting = [size for size in self._ladder.sizes if size >= batch.num_reqs]
        for size in fitting:
            key = batch.padded_to(size)
            if key in self._captured:
                reason = Reason.EXACT if size == batch.num_reqs else Reason.PADDED
                return Decision(batch, Mode.FULL, key, reason, f"{batch.num_reqs} → {size}")
        if all(size in self._dropped for size in fitting):
            size = fitting[0]
            detail = f"size {size} is dropped: {self._dropped[size]}"
            return Decision(batch, Mode.EAGER, batch, Reason.SIZE_DROPPED, detail)
        return Decision(batch, Mode.EAGER, batch, Reason.NO_SUCH_KEY, f"{batch} was never captured")
