"""Slots: what a step's buffers are called, what their rows stand for, and what padded rows hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import numpy as np
import torch

from stepgraph.runtime.errors import ConfigError, InputError

Unit = Literal["request", "token"]
Rows = dict[Unit, int]
"""How many rows slots of either unit have."""

NUMPY_KNOWS: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


class PaddingPolicy(Enum):
    """What the rows between the real and the padded size hold when a step runs.

    Required for each slot, because every wrong choice is silent: an index tail that is not reset writes into
    somebody's cache. The names follow SGLang's buffer registry.
    """

    KEEP_PAD = auto()
    """Left alone; the step does not read it. The slot may be left out of a step's inputs."""
    FILL_SENTINEL = auto()
    """Reset to the slot's `pad_value` at every staging."""
    ZERO = auto()
    """Reset to 0 at every staging. For indices: row 0 or block 0 must be a harmless target."""
    FOREACH_COPY = auto()
    """Left alone, and the head must be given with every step."""
    FILL_ONCE = auto()
    """The whole slot is `pad_value` at allocation; later only heads are written."""


@dataclass(frozen=True)
class Slot:
    """One named buffer of `max_requests` or `max_tokens` rows.

    per: what a row stands for.
    shape: trailing dimensions of a row.
    pad: what padded rows hold; see PaddingPolicy.
    pad_value: for FILL_SENTINEL and FILL_ONCE.
    owner: `host` slots travel in the packed copy; `device` slots are advanced by the step itself and only
        patched row by row from the host.
    mixed_only: left out of the views of a uniform batch or key, so that a step tells the two kinds apart by what it is
        given; it is staged all the same, since a uniform batch may run on a key of its token count.

    Raises:
        ConfigError: a name that is no identifier, or a pad value that its policy would ignore.
    """

    name: str
    dtype: torch.dtype
    per: Unit
    pad: PaddingPolicy
    shape: tuple[int, ...] = ()
    pad_value: float = 0
    owner: Literal["host", "device"] = "host"
    mixed_only: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"slot {self.name!r}: the name becomes a keyword of the step; use an identifier")
        if self.per not in ("request", "token") or self.owner not in ("host", "device"):
            raise ConfigError(f"slot {self.name}: per is 'request' or 'token', owner is 'host' or 'device'")
        if not isinstance(self.pad, PaddingPolicy):
            raise ConfigError(f"slot {self.name}: pad must be a PaddingPolicy, not {self.pad!r}")
        if self.pad_value and self.pad not in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE):
            raise ConfigError(f"slot {self.name}: {self.pad.name} ignores its pad_value; use FILL_SENTINEL")

    @property
    def tail_value(self) -> float | None:
        """What staging resets the tail to, or None where it leaves it."""
        return {PaddingPolicy.ZERO: 0, PaddingPolicy.FILL_SENTINEL: self.pad_value}.get(self.pad)

    def checked(self, rows: int, value: Any) -> torch.Tensor | np.ndarray[Any, Any]:
        """The value as a tensor or array of `rows` rows whose kind the slot can hold.

        Raises:
            InputError: another shape, or a dtype that would lose its kind.
        """
        try:
            array = value.detach() if isinstance(value, torch.Tensor) else np.asarray(value)
        except ValueError:
            raise InputError(f"slot {self.name}: its rows are of different lengths") from None
        if array.shape != (rows, *self.shape):
            raise InputError(f"slot {self.name}: {(rows, *self.shape)} expected, {tuple(array.shape)} given")
        if isinstance(array, torch.Tensor):
            fits = torch.can_cast(array.dtype, self.dtype)
        elif (known := NUMPY_KNOWS.get(self.dtype)) is not None:
            fits = array.dtype == known or np.can_cast(array.dtype, known, "same_kind")
        else:
            array = torch.from_numpy(array)
            fits = torch.can_cast(array.dtype, self.dtype)
        if not fits:
            raise InputError(f"slot {self.name}: holds {self.dtype}; {array.dtype} would lose its kind")
        return array
