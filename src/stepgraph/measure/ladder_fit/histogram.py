"""Steps by number of rows, as somebody counted them: plain JSON, our own statistics, vLLM's cudagraph metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.runtime.errors import ConfigError

_MOST = 10**15
VLLM_ROW = re.compile(r"\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*([\w.]+)\s*\|\s*(\d+)\s*\|")
"""Unpadded tokens, padded tokens, paddings, mode, count; logged with `--cudagraph-metrics`, behind any prefix."""


@dataclass(frozen=True)
class Histogram:
    """steps: by number of rows. what: how they were counted. left_out: steps that no decode graph is for."""

    steps: Mapping[int, int]
    what: str
    left_out: int = 0

    def counts(self, most: int) -> Integers:
        """By number of rows, from 0 to `most`. Raises ConfigError: a step has more rows."""
        if max(self.steps) > most:
            raise ConfigError(f"histogram: it has steps of {max(self.steps)} rows, and the largest size is {most}")
        return np.array([self.steps.get(rows, 0) for rows in range(most + 1)], dtype=np.int64)


def read_counts(found: Mapping[str, Any]) -> Histogram:
    """`{"7": 1200, "8": 3400}`: rows and the number of steps. Raises ConfigError: anything else."""
    try:
        counted = Counter({int(rows): _whole(steps) for rows, steps in found.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"histogram: rows and steps are whole numbers, as in {{'8': 3400}} ({error})") from None
    return _histogram(counted, "a histogram", 0)


def read_stats(found: Mapping[str, Any]) -> Histogram:
    """What `stepgraph run --json` printed, or `Stats.as_dict()`: of its routes, steps of one token a request.

    Raises:
        ConfigError: a route lacks a field.
    """
    counted: Counter[int] = Counter()
    left_out = 0
    try:
        for route in found["routes"]:
            if route["kind"] == "uniform" and route["query_len"] == 1:
                counted[int(route["real"])] += int(route["steps"])
            else:
                left_out += int(route["steps"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"statistics: a route without a number: {error}") from None
    return _histogram(counted, "stepgraph's statistics", left_out)


def read_vllm(lines: Iterable[str]) -> Histogram:
    """The tables of vLLM's `--cudagraph-metrics` in a log, all of them added up. Steps of mode NONE are left out: most
    of them are prefill.

    Raises:
        ConfigError: there is no such table.
    """
    counted: Counter[int] = Counter()
    left_out = 0
    for line in lines:
        if row := VLLM_ROW.search(line):
            unpadded, _, _, mode, count = row.groups()
            if mode.rpartition(".")[2] == "NONE":
                left_out += int(count)
            else:
                counted[int(unpadded)] += int(count)
    if not counted and not left_out:
        raise ConfigError(
            "none of the kinds that are known: rows and steps as JSON, the JSON of `stepgraph run`, a log with "
            "tables of vLLM's --cudagraph-metrics, Azure's CSV, Mooncake's JSONL"
        )
    return _histogram(counted, "vLLM's cudagraph metrics", left_out)


def _whole(steps: Any) -> int:
    if int(steps) != steps:
        raise ValueError(f"{steps!r} is not whole")
    return int(steps)


def _histogram(counted: Counter[int], what: str, left_out: int) -> Histogram:
    if any(steps < 0 or rows < 1 for rows, steps in counted.items()):
        raise ConfigError(f"{what}: a step has at least one row, and there are no fewer than no steps")
    if counted.total() > _MOST:
        raise ConfigError(f"{what}: more than {_MOST:,} steps")
    steps = {rows: count for rows, count in sorted(counted.items()) if count}
    if not steps:
        raise ConfigError(f"{what}: no step of decoding")
    return Histogram(steps, what, left_out)
