"""Reads traffic of any form that is known, by what the file begins with."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from stepgraph.measure.ladder_fit.histogram import Histogram, read_counts, read_stats, read_vllm
from stepgraph.measure.ladder_fit.requests import AZURE, Requests, read_azure, read_mooncake
from stepgraph.runtime.errors import ConfigError


def load_traffic(path: Path) -> Requests | Histogram:
    """A histogram, our statistics, a log with vLLM's cudagraph metrics, or a trace of Azure or Mooncake.

    Raises:
        ConfigError: it cannot be read, or is none of these.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = next((line for line in file if line.strip()), "")
            lines = chain([first], file)
            if first.startswith(AZURE[0]):
                return read_azure(lines)
            if first.lstrip().startswith("{"):
                return _read_json(first, "".join(file))
            return read_vllm(lines)
    except OSError as error:
        raise ConfigError(f"traffic: {path} cannot be read: {error.strerror or error}") from None
    except ConfigError as error:
        raise ConfigError(f"traffic: {path}: {error}") from None


def _read_json(first: str, rest: str) -> Requests | Histogram:
    try:
        found = json.loads(first + rest)
    except ValueError:
        return read_mooncake([first, *rest.split("\n")])  # an object a line
    except RecursionError:
        raise ConfigError("it is nested too deeply to be any of these") from None
    if "output_length" in found:
        return read_mooncake([first])
    return read_stats(found) if "routes" in found else read_counts(found)
