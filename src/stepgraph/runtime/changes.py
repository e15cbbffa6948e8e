"""What a rule changed in a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    INFO = "info"  # nothing that was asked for is lost
    WARNING = "warning"  # batches run in a lesser mode than asked for
    ERROR = "error"  # cannot work


@dataclass(frozen=True)
class Change:
    """One setting that a rule changed. where: the setting, such as `prefill.backend`."""

    where: str
    before: str
    after: str
    rule: str
    reason: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.where} {self.before} → {self.after} ({self.rule}): {self.reason}"
