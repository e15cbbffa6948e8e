"""cuda.bindings, which is optional: its driver, and what its functions answer."""

from __future__ import annotations

from typing import Any


def load_driver() -> Any | None:
    """The driver's functions, or None where cuda.bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def result_of(answer: tuple[Any, ...], error: type[Exception], what: str) -> Any:
    """What a function returned beside its status: None, the value, or a list of several.

    Raises `error` where the status is one: `what`, and the status by name.
    """
    status, *values = answer
    if int(status):
        raise error(f"{what}: {status.name}")
    return values if len(values) > 1 else values[0] if values else None
