"""What `runner.verify()` found, key by key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.naming import count, describe


class FaultKind(StrEnum):
    """What does not agree."""

    RECORDING = "recording"
    """A replay and the step itself, on the same rows."""
    PADDING = "padding"
    """The real rows of a padded step and the same rows without padding, both eager."""
    LATER = "later"
    """A replay and the same replay after other keys have run."""
    RANDOM = "random"
    """Two eager runs that draw other random numbers, and two replays that draw the same."""
    UNREPEATABLE = "unrepeatable"
    """Two eager runs from the same state and the same random numbers."""


@dataclass(frozen=True)
class Fault:
    """One difference. batch: the live batch. what: the tensors that differ. where: the first operator, in lines."""

    kind: FaultKind
    batch: BatchDescriptor
    what: tuple[str, ...]
    where: tuple[str, ...] = ()

    def __str__(self) -> str:
        title = {
            FaultKind.RECORDING: "the replay differs from eager",
            FaultKind.PADDING: "padding changes real rows",
            FaultKind.LATER: "the replay is another one after other keys have run",
            FaultKind.RANDOM: "RNG does not advance",
            FaultKind.UNREPEATABLE: "eager does not repeat itself, so nothing can be compared with it",
        }[self.kind]
        lines = [f"{title} (batch of {describe_live(self.batch)})", *self.what, *self.where]
        return "\n  ".join(lines)


@dataclass
class KeyReport:
    """One captured key. batches: how many were tried."""

    key: BatchDescriptor
    mode: Mode
    batches: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        head = f"{self.mode} {describe(self.key)}: "
        if self.ok:
            return f"{head}{self.batches} batches as in eager"
        return head + "\n".join(str(fault) for fault in self.faults)


@dataclass
class VerifyReport:
    """Every captured key, in the order of the capture."""

    keys: list[KeyReport]

    @property
    def ok(self) -> bool:
        return all(key.ok for key in self.keys)

    @property
    def faults(self) -> list[Fault]:
        return [fault for key in self.keys for fault in key.faults]

    def __str__(self) -> str:
        return "\n".join(str(key) for key in self.keys)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "ok": self.ok,
            "keys": [
                {
                    "key": describe(key.key),
                    "mode": key.mode.value,
                    "batches": key.batches,
                    "faults": [
                        {
                            "kind": fault.kind.value,
                            "batch": describe_live(fault.batch),
                            "what": list(fault.what),
                            "where": list(fault.where),
                        }
                        for fault in key.faults
                    ],
                }
                for key in self.keys
            ],
        }


def describe_live(batch: BatchDescriptor) -> str:
    if batch.is_uniform:
        return describe(batch)
    return f"{count(batch.num_tokens, 'token')} of {count(batch.num_reqs or 0, 'request')}"
