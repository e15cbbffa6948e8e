"""What every step did: counts by size, mode and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stepgraph.runtime.dispatch import Decision


@dataclass
class Stats:
    """Steps counted by route. Memory does not grow with the number of steps."""

    counts: Counter[Decision] = field(default_factory=Counter)

    def record(self, decision: Decision) -> None:
        self.counts[decision] += 1

    @property
    def steps(self) -> int:
        return self.counts.total()

    @property
    def real_rows(self) -> int:
        return sum(decision.real * count for decision, count in self.counts.items())

    @property
    def padded_rows(self) -> int:
        """Rows that were computed for no request."""
        return sum((decision.padded - decision.real) * count for decision, count in self.counts.items())

    def by_mode(self) -> dict[str, int]:
        return dict(self._totals(lambda decision: decision.mode.value))

    def by_reason(self) -> dict[str, int]:
        return dict(self._totals(lambda decision: decision.reason.value))

    def routes(self) -> list[dict[str, int | str]]:
        """One row per (real rows, padded rows, mode, reason), with its number of steps."""
        totals = self._totals(lambda d: (d.real, d.padded, d.mode.value, d.reason.value))
        return [
            {"real": real, "padded": padded, "mode": mode, "reason": reason, "steps": count}
            for (real, padded, mode, reason), count in sorted(totals.items())
        ]

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "real_rows": self.real_rows,
            "padded_rows": self.padded_rows,
            "modes": self.by_mode(),
            "reasons": self.by_reason(),
            "routes": self.routes(),
        }

    def to_prometheus(self, prefix: str = "stepgraph") -> str:
        """The counts in Prometheus' text exposition format."""
        totals = self._totals(lambda d: (d.mode.value, d.reason.value))
        lines = [f"# HELP {prefix}_steps_total Steps by mode and reason.", f"# TYPE {prefix}_steps_total counter"]
        lines += [
            f'{prefix}_steps_total{{mode="{mode}",reason="{reason}"}} {count}'
            for (mode, reason), count in sorted(totals.items())
        ]
        for name, help_text, value in (
            ("real_rows", "Rows computed for a request.", self.real_rows),
            ("padded_rows", "Rows computed for no request.", self.padded_rows),
        ):
            lines.append(f"# HELP {prefix}_{name}_total {help_text}")
            lines.append(f"# TYPE {prefix}_{name}_total counter")
            lines.append(f"{prefix}_{name}_total {value}")
        return "\n".join(lines) + "\n"

    def _totals(self, label: Callable[[Decision], Any]) -> Counter[Any]:
        totals: Counter[Any] = Counter()
        for decision, count in self.counts.items():
            totals[label(decision)] += count
        return totals
