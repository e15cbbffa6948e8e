"""What every step did: counts by kind of batch, size, mode and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from stepgraph.runtime.dispatch import Decision

MOST_DECISIONS = 8192
"""Decisions counted one by one; then their counts are folded into routes, of which there are far fewer."""


@dataclass(frozen=True, order=True)
class Route:
    """What steps have in common that are counted together.

    kind: `uniform` (every request brings query_len tokens) or `mixed` (query_len 0). real, padded: tokens that belong
    to a request, and tokens computed for a step; the same as requests where each brings one.
    """

    kind: str
    query_len: int
    real: int
    padded: int
    mode: str
    reason: str

    @classmethod
    def of(cls, decision: Decision) -> Route:
        query_len = decision.batch.query_len
        return cls(
            "mixed" if query_len is None else "uniform",
            query_len or 0,
            decision.batch.num_tokens,
            decision.key.num_tokens,
            decision.mode.value,
            decision.reason.value,
        )


class Stats:
    """Steps counted by route. Memory does not grow with the number of steps.

    compiles: steps that torch's compiler was run for while serving; compile_seconds: what that took.
    loops: launches that ran several steps; looped_steps: those. not_looped: why others that might have did not.
    """

    def __init__(self) -> None:
        self._recent: Counter[Decision] = Counter()  # counting a decision costs next to nothing
        self._folded: Counter[Route] = Counter()
        self.compiles = 0
        self.compile_seconds = 0.0
        self.loops = 0
        self.looped_steps = 0
        self.not_looped: Counter[str] = Counter()

    def looped(self, decision: Decision, steps: int) -> None:
        """So many steps were one launch."""
        self.loops += 1
        self.looped_steps += steps
        self._recent[decision] += steps - 1
        self.record(decision)

    def record(self, decision: Decision) -> None:
        self._recent[decision] += 1
        if len(self._recent) > MOST_DECISIONS:
            self._fold()

    def compiled(self, seconds: float) -> None:
        """A step was compiled while serving."""
        self.compiles += 1
        self.compile_seconds += seconds

    @property
    def steps(self) -> int:
        return self._counts().total()

    @property
    def real_rows(self) -> int:
        """Tokens computed for a request."""
        return sum(route.real * count for route, count in self._counts().items())

    @property
    def padded_rows(self) -> int:
        """Tokens that were computed for no request."""
        return sum((route.padded - route.real) * count for route, count in self._counts().items())

    def by_mode(self) -> dict[str, int]:
        return dict(self._totals(lambda route: route.mode))

    def by_reason(self) -> dict[str, int]:
        return dict(self._totals(lambda route: route.reason))

    def routes(self) -> list[dict[str, int | str]]:
        """One row per `Route`, with its number of steps."""
        return [{**asdict(route), "steps": count} for route, count in sorted(self._counts().items())]

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "real_rows": self.real_rows,
            "padded_rows": self.padded_rows,
            "modes": self.by_mode(),
            "reasons": self.by_reason(),
            "routes": self.routes(),
            "compiles": self.compiles,
            "compile_seconds": self.compile_seconds,
            "loops": {"launches": self.loops, "steps": self.looped_steps, "not": dict(self.not_looped)},
        }

    def to_prometheus(self, prefix: str = "stepgraph") -> str:
        """The counts in Prometheus' text exposition format."""
        totals = self._totals(lambda route: (route.mode, route.reason))
        lines = [f"# HELP {prefix}_steps_total Steps by mode and reason.", f"# TYPE {prefix}_steps_total counter"]
        lines += [
            f'{prefix}_steps_total{{mode="{mode}",reason="{reason}"}} {count}'
            for (mode, reason), count in sorted(totals.items())
        ]
        for name, help_text, value in (
            ("real_rows", "Rows computed for a request.", self.real_rows),
            ("padded_rows", "Rows computed for no request.", self.padded_rows),
            ("compiles", "Steps compiled while serving.", self.compiles),
            ("compile_seconds", "Seconds in them.", self.compile_seconds),
            ("loops", "Launches that ran several steps.", self.loops),
            ("looped_steps", "Steps in them.", self.looped_steps),
        ):
            lines.append(f"# HELP {prefix}_{name}_total {help_text}")
            lines.append(f"# TYPE {prefix}_{name}_total counter")
            lines.append(f"{prefix}_{name}_total {value}")
        return "\n".join(lines) + "\n"

    def _counts(self) -> Counter[Route]:
        counts = self._folded.copy()
        for decision, count in list(self._recent.items()):  # a copy: another thread may read while steps are counted
            counts[Route.of(decision)] += count
        return counts

    def _fold(self) -> None:
        self._folded = self._counts()
        self._recent.clear()

    def _totals(self, label: Callable[[Route], Any]) -> Counter[Any]:
        totals: Counter[Any] = Counter()
        for route, count in self._counts().items():
            totals[label(route)] += count
        return totals
