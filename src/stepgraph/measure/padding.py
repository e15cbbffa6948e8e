"""What padding costs: rows, and the time they take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.tensors import expected_tensors
from stepgraph.measure.curve import LatencyCurve
from stepgraph.measure.result import Figure, Rows
from stepgraph.runtime.errors import ConfigError

PEAK_FLOPS = 989e12
"""Of an H100 or H200 SXM in bfloat16 without sparsity, by its data sheet; the published 65 µs take this."""


@dataclass(frozen=True)
class Route:
    """Steps that ran alike, as `Stats.routes` counts them.

    kind: uniform (query_len tokens a request) or mixed (query_len 0). real, padded: tokens. reason: why they ran so.
    """

    kind: str
    query_len: int
    real: int
    padded: int
    mode: str
    reason: str
    steps: int

    def __post_init__(self) -> None:
        """Raises ValueError: nothing that steps could have been."""
        numbers = (self.query_len, self.real, self.padded, self.steps)
        if any(type(number) is not int for number in numbers):
            raise ValueError("query_len, real, padded and steps are whole numbers")
        if any(not isinstance(text, str) for text in (self.kind, self.mode, self.reason)):
            raise ValueError("kind, mode and reason are texts")
        least = 0 if self.kind == "mixed" else 1
        if not (self.query_len >= least and 1 <= self.real <= self.padded and self.steps >= 1):
            raise ValueError(f"{self.steps} steps of {self.real} tokens padded to {self.padded} cannot be")

    @property
    def key(self) -> str:
        """Of the graph that ran them; "" for eager steps."""
        if self.mode == "EAGER":
            return ""
        if self.kind == "mixed":
            return f"{self.padded} tokens"
        requests = self.padded // self.query_len
        return f"{requests} requests" if self.query_len == 1 else f"{requests} requests of {self.query_len} tokens"

    @property
    def padded_rows(self) -> int:
        """Tokens computed for no request, of all these steps."""
        return (self.padded - self.real) * self.steps

    def padding_ms(self, curve: LatencyCurve) -> float | None:
        """Of one step: the time at the padded size less that at the real one. None where the curve says nothing."""
        if self.padded == self.real:
            return 0.0
        if self.query_len != 1:
            return None
        real, padded = curve.ms(self.real), curve.ms(self.padded)
        return None if real is None or padded is None else padded - real


def load_routes(path: Path) -> list[Route]:
    """What `stepgraph run --json` printed, or `Stats.as_dict()` as JSON.

    Raises:
        ConfigError: the file holds no steps, or cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["routes"]
        routes = [Route(**route) for route in found]
    except OSError as error:
        raise ConfigError(f"run: {path} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"run: {path} holds no routes ({error}); `stepgraph run --json` prints them") from None
    if not routes:
        raise ConfigError(f"run: {path} holds no steps")
    return routes


def routes_table(routes: Sequence[Route], curve: LatencyCurve) -> Rows:
    """One row a route, the dearest first."""
    rows: list[list[Any]] = []
    for route in routes:
        one = route.padding_ms(curve)
        us, ms = (None, None) if one is None else (one * 1e3, one * route.steps)
        rows.append(
            [route.kind, route.real, route.padded, route.mode, route.key, route.steps, route.padded_rows, us, ms]
        )
    rows.sort(key=lambda row: -(row[-1] or 0))
    columns = ["kind", "real", "padded", "mode", "key", "steps", "padded rows", "µs a step", "ms in all"]
    definitions = {
        "real, padded": "tokens of a step that belong to a request, and tokens computed",
        "key": "of the graph that ran the steps",
        "padded rows": "tokens computed for no request, of all these steps",
        "µs a step": "of the latency curve: time at the padded size less time at the real one. Its rows attend to a "
        "context each and padded ones to nothing, so it is more than padding costs; – where the curve says nothing",
    }
    return Rows("padding of the run", columns, rows, definitions)


def routes_figures(routes: Sequence[Route], curve: LatencyCurve) -> list[Figure]:
    """Of the whole run: rows, and time where the curve knows it."""
    steps = sum(route.steps for route in routes)
    computed = sum(route.padded * route.steps for route in routes)
    padded = sum(route.padded_rows for route in routes)
    costs = [(route, route.padding_ms(curve), curve.ms(route.padded)) for route in routes if route.query_len == 1]
    known = [(route, cost, whole) for route, cost, whole in costs if cost is not None and whole is not None]
    lost = sum(cost * route.steps for route, cost, _ in known)
    spent = sum(whole * route.steps for route, _, whole in known)
    counted = sum(route.steps for route, _, _ in known)
    figures = [
        Figure.of("padded rows", padded / computed * 100, "%", f"tokens computed for no request, of {computed:,}"),
    ]
    if spent:
        of = f"of the latency curve, over {counted:,} decode steps of {steps:,} steps"
        figures += [
            Figure.of("time of padding", lost, "ms", f"padded size less real size, {of}"),
            Figure.of("time of padding, share", lost / spent * 100, "%", f"of the time of these steps, {of}"),
        ]
    return figures


def to_prometheus(routes: Sequence[Route], curve: LatencyCurve, prefix: str = "stepgraph") -> str:
    """The table in Prometheus' text exposition format; seconds only where the curve knows them."""
    steps, rows, seconds = [], [], []
    for route in sorted(routes, key=lambda r: (r.kind, r.query_len, r.real, r.padded, r.mode, r.reason)):
        values: Mapping[str, Any] = {
            **{"kind": route.kind, "real": route.real, "padded": route.padded},
            **{"mode": route.mode, "key": route.key, "reason": route.reason},
        }
        labels = ",".join(f'{name}="{value}"' for name, value in values.items())
        steps.append(f"{prefix}_padding_steps_total{{{labels}}} {route.steps}")
        rows.append(f"{prefix}_padding_rows_total{{{labels}}} {route.padded_rows}")
        one = route.padding_ms(curve)
        if one is not None:
            seconds.append(f"{prefix}_padding_seconds{{{labels}}} {one * route.steps / 1e3:.9g}")
    lines: list[str] = []
    for name, help_text, kind, found in (
        ("padding_steps_total", "Steps by real and padded size, mode and key.", "counter", steps),
        ("padding_rows_total", "Tokens computed for no request.", "counter", rows),
        # The curve's difference may be negative, so that this is no counter.
        ("padding_seconds", "Time of padding by the latency curve: padded size less real size.", "gauge", seconds),
    ):
        lines += [f"# HELP {prefix}_{name} {help_text}", f"# TYPE {prefix}_{name} {kind}", *found]
    return "\n".join(lines) + "\n"


def predicted_flops(config: ModelConfig, rows: int) -> float:
    """Of so many padded rows: two for each parameter and row, the embedding included, as 2BN counts them."""
    return 2.0 * rows * sum(math.prod(shape) for shape in expected_tensors(config).values())
