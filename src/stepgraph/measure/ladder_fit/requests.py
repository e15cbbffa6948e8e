"""Request traces: Azure's CSV and Mooncake's JSONL."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from stepgraph.measure.ladder_fit.optimum import Integers
from stepgraph.runtime.errors import ConfigError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_CENTURY = 3.2e9
"""Seconds. Longer traces, and more tokens of a request than that, are errors."""
MOONCAKE = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True)
class Requests:
    """By arrival. arrival_ns: from the first one. prompt, output: tokens; the first of `output` is the prefill's."""

    arrival_ns: Integers
    prompt: Integers
    output: Integers

    @property
    def decode_tokens(self) -> Integers:
        return np.maximum(self.output - 1, 0)

    @property
    def decodes(self) -> bool:
        """Whether any of them decodes a token."""
        return bool((self.output > 1).any())

    @property
    def mean_context(self) -> float:
        """Tokens that a row attends to, the mean over decoded tokens; 0 where none is decoded."""
        decoded = self.decode_tokens
        return float((decoded * (self.prompt + decoded / 2)).sum() / decoded.sum()) if self.decodes else 0.0

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def faster(self, rate: float) -> Requests:
        """The same requests at so many times the arrival rate. Raises ConfigError: not positive, or so low that they
        take more than a century."""
        if not rate > 0:
            raise ConfigError(f"rate: {rate} is not above 0")
        if self.arrival_ns[-1] / _CENTURY > rate * 1e9:
            raise ConfigError(f"rate: at {rate} times the rate the trace takes more than a century")
        return Requests((self.arrival_ns / rate).astype(np.int64), self.prompt, self.output)

    def halves(self) -> tuple[Requests, Requests]:
        """Those that arrive in the first half of the trace's time, and the others, counted from its middle."""
        middle = int(self.arrival_ns[-1]) // 2
        cut = int(np.searchsorted(self.arrival_ns, middle, side="right"))
        first = Requests(self.arrival_ns[:cut], self.prompt[:cut], self.output[:cut])
        return first, Requests(self.arrival_ns[cut:] - middle, self.prompt[cut:], self.output[cut:])


def read_azure(lines: Iterable[str]) -> Requests:
    """A trace of the Azure public dataset for LLM inference (2023 or 2024).

    Raises:
        ConfigError: another header, or a row that holds no time and two numbers of tokens.
    """
    table = csv.DictReader(lines)
    try:
        names = set(table.fieldnames or ())
    except csv.Error as error:
        raise ConfigError(f"an Azure trace: its header: {error}") from None
    if missing := set(AZURE) - names:
        raise ConfigError(f"an Azure trace has a column {min(missing)}")
    time, prompt, output = AZURE
    return _requests(
        "an Azure trace",
        ((datetime.fromisoformat(row[time]).timestamp(), int(row[prompt]), int(row[output])) for row in table),
    )


def read_mooncake(lines: Iterable[str]) -> Requests:
    """A trace of Mooncake, one JSON object a line, its timestamps in ms. Prefixes that requests share are not read.

    Raises:
        ConfigError: a line is no such object.
    """
    found = (json.loads(line) for line in lines if line.strip())
    time, prompt, output = MOONCAKE
    return _requests("a Mooncake trace", ((float(r[time]) / 1e3, int(r[prompt]), int(r[output])) for r in found))


def _requests(what: str, rows: Iterator[tuple[float, int, int]]) -> Requests:
    """rows: arrival in seconds, tokens of the prompt, tokens of the answer."""
    found: list[tuple[float, int, int]] = []
    try:
        for row in rows:
            if not 0 <= min(row[1:]) <= max(row[1:]) <= _CENTURY:
                raise ValueError("a number of tokens that cannot be")
            if not abs(row[0]) < 100 * _CENTURY:
                raise ValueError("a time that cannot be")
            found.append(row)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{what}: request {len(found) + 1}: {type(error).__name__}: {error}") from None
    if not found:
        raise ConfigError(f"{what}: no requests")
    found.sort(key=lambda request: request[0])
    seconds, prompts, outputs = zip(*found, strict=True)
    if seconds[-1] - seconds[0] > _CENTURY:
        raise ConfigError(f"{what}: its requests arrive over more than a century")
    arrivals = [round((at - seconds[0]) * 1e9) for at in seconds]
    return Requests(*(np.array(column, dtype=np.int64) for column in (arrivals, prompts, outputs)))
