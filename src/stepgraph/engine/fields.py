"""Reads values out of files that others wrote: each is checked, and a wrong one is a ModelError that names it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepgraph.engine.errors import ModelError

_LARGEST_NUMBER = 1e30  # leaves out infinity and integers that no float holds


def read_json(path: Path, where: str = "a model directory") -> dict[str, Any]:
    """The JSON object in `path`, which `where` needs. Raises ModelError when it is missing, not JSON, or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {where} needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def one_line(error: BaseException) -> str:
    """The message of someone else's exception as one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def integer(
    fields: Mapping[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    *,
    low: int = 1,
    high: int = 2**31 - 1,
) -> int:
    """An integer from `low` to `high`; `default` where it is absent or null, which must not be where that is None."""
    value = fields.get(key)
    if value is None:
        value = default
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{where}: {key} must be an integer from {low} to {high}, {_got(value)}")
    return value


def positive(fields: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A finite number above 0; `default` as in `integer`."""
    value = fields.get(key)
    if value is None:
        value = default
    if value is None or type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
        raise ModelError(f"{where}: {key} must be a number above 0 and at most {_LARGEST_NUMBER:g}, {_got(value)}")
    return float(value)


def flag(fields: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """true or false; `default` where it is absent."""
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{where}: {key} must be true or false, got {value!r}")
    return value


def token_ids(fields: Mapping[str, Any], key: str, vocab_size: int, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or none at all."""
    value = fields.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ModelError(f"{where}: {key} must be a token id from 0 to {vocab_size - 1}, got {token!r}")
    return tuple(ids)


def _got(value: object) -> str:
    return "it is absent" if value is None else f"got {value!r:.80}"
