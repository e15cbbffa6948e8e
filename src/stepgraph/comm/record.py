"""What a graph has frozen of its collectives: a choice that was made at the capture holds for every replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepgraph.comm.choice import Choice
from stepgraph.runtime.batch import BatchDescriptor


@dataclass(frozen=True)
class Collective:
    """One captured collective. kind: `all_reduce` or `gather`. nbytes: what each rank brings."""

    kind: str
    nbytes: int
    choice: Choice

    def as_dict(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "kind": self.kind,
            "bytes": self.nbytes,
            "algorithm": choice.algorithm.value,
            "source": choice.source.value,
            "reason": choice.reason,
        }


@dataclass
class CollectiveLog:
    """The collectives of each recorded step, by its key, in the order in which they run."""

    by_key: dict[BatchDescriptor, list[Collective]] = field(default_factory=dict)
    _current: list[Collective] = field(default_factory=list)

    def begin(self, key: BatchDescriptor) -> None:
        """What is added from now on is this key's; an earlier attempt at it is forgotten."""
        self._current = self.by_key[key] = []

    def add(self, collective: Collective) -> None:
        self._current.append(collective)
