"""Slots: what a step's buffers are called, what their rows stand for, and what padded rows hold."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from numbers import Real
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

    Of a slot that the device owns, ZERO and FILL_SENTINEL reset only rows that change hands: those that a request gave
    up, and those that one takes without a patch. A step that advances such a slot leaves its padded rows alone (with a
    mask) wherever another value could do harm, as an index does.
    """

    KEEP_PAD = auto()
    """Left alone; the step does not read it. The slot may be left out of a step's inputs."""
    FILL_SENTINEL = auto()
    """Reset to the slot's `pad_value` at every staging of a host-owned slot."""
    ZERO = auto()
    """Reset to 0 at every staging of a host-owned slot. For indices: row 0 or block 0 must be a harmless target."""
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
        patched row by row from the host. Their padded rows hold what the step makes of them; see PaddingPolicy.
    mixed_only: left out of the views of a uniform batch or key, so that a step tells the two kinds apart by what it is
        given; it is staged all the same, since a uniform batch may run on a key of its token count.

    Raises:
        ConfigError: a name that is no keyword argument, a shape that is none, or a pad value that the dtype cannot hold
            or the policy would ignore.
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
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError(f"slot {self.name!r}: the name becomes a keyword of the step; use an identifier")
        if keyword.iskeyword(self.name) or self.name == "self":
            raise ConfigError(f"slot {self.name}: Python keeps this name for itself; use another")
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"slot {self.name}: {self.dtype!r} is no torch.dtype")
        object.__setattr__(self, "shape", self._checked_shape())
        if self.per not in ("request", "token") or self.owner not in ("host", "device"):
            raise ConfigError(f"slot {self.name}: per is 'request' or 'token', owner is 'host' or 'device'")
        if not isinstance(self.pad, PaddingPolicy):
            raise ConfigError(f"slot {self.name}: pad must be a PaddingPolicy, not {self.pad!r}")
        self._check_pad_value()
        if self.pad_value and self.pad not in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE):
            raise ConfigError(f"slot {self.name}: {self.pad.name} ignores its pad_value; use FILL_SENTINEL")

    @property
    def tail_value(self) -> float | None:
        """What staging resets the tail to, or None where it leaves it."""
        return {PaddingPolicy.ZERO: 0, PaddingPolicy.FILL_SENTINEL: self.pad_value}.get(self.pad)

    def checked(self, rows: int, value: Any) -> torch.Tensor | np.ndarray[Any, Any]:
        """The value as a tensor or array of `rows` rows whose kind the slot can hold.

        Raises:
            InputError: another shape, a dtype that would lose its kind, an integer that does not fit (what lies on a
                device is not looked at), or a tensor without memory to copy.
        """
        known = NUMPY_KNOWS.get(self.dtype)
        try:
            array = value.detach() if isinstance(value, torch.Tensor) else np.asarray(value)
        except ValueError:
            raise InputError(f"slot {self.name}: its rows are of different lengths") from None
        if array.shape != (rows, *self.shape):
            raise InputError(f"slot {self.name}: {(rows, *self.shape)} expected, {tuple(array.shape)} given")
        same = False
        if isinstance(array, torch.Tensor):
            if array.layout is not torch.strided or array.is_meta:
                raise InputError(f"slot {self.name}: a {array.layout} tensor on {array.device} cannot be staged")
            same = array.dtype == self.dtype
            fits = same or torch.can_cast(array.dtype, self.dtype)
        elif known is not None:
            same = array.dtype == known
            fits = same or np.can_cast(array.dtype, known, "same_kind")
        elif fits := array.dtype.kind in "biufc":
            array = torch.from_numpy(np.ascontiguousarray(array))
            fits = torch.can_cast(array.dtype, self.dtype)
        if not fits:
            raise InputError(f"slot {self.name}: holds {self.dtype}; {array.dtype} would lose its kind")
        if not same:
            self._check_range(array)
        return array

    def _check_range(self, array: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Refuse integers that a narrower dtype would wrap."""
        limits = self._limits()
        if limits is None:
            return
        if isinstance(array, torch.Tensor):
            if array.device.type != "cpu":
                return  # a look would wait for the device
            array = array.numpy()
        if array.dtype.kind not in "iu" or not array.size:
            return
        given, (lowest, highest) = np.iinfo(array.dtype), limits
        if lowest <= given.min and given.max <= highest:
            return
        for number in (int(array.min()), int(array.max())):
            if not lowest <= number <= highest:
                raise InputError(f"slot {self.name}: {number} does not fit {self.dtype}, {lowest} to {highest}")

    def _limits(self) -> tuple[int, int] | None:
        """The integers that it can hold, or None where it does not hold integers only."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return None
        if self.dtype is torch.bool:
            return 0, 1
        limits = torch.iinfo(self.dtype)
        return limits.min, limits.max

    def _checked_shape(self) -> tuple[int, ...]:
        try:
            shape = tuple(map(operator.index, self.shape))
        except TypeError:
            raise ConfigError(f"slot {self.name}: shape is a tuple of integers, not {self.shape!r}") from None
        if min(shape, default=0) < 0:
            raise ConfigError(f"slot {self.name}: shape {shape} has a negative dimension")
        return shape

    def _check_pad_value(self) -> None:
        value, limits = self.pad_value, self._limits()
        if not isinstance(value, Real):
            raise ConfigError(f"slot {self.name}: pad_value is a number, not {value!r}")
        if limits is None:
            holds = not torch.finfo(self.dtype).max < abs(value) < math.inf  # it does hold NaN
        else:
            holds = limits[0] <= value <= limits[1] and value == int(value)
        if not holds:
            raise ConfigError(f"slot {self.name}: {self.dtype} cannot hold the pad_value {value}")


def check_patch(
    slots: Mapping[str, Slot], capacity: Rows, rows: Sequence[int], values: Mapping[str, Any]
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Rows and values of a patch of device-owned slots; nothing to write where there are no rows.

    capacity: how many rows slots of either unit have.

    Raises:
        InputError: a slot that the host owns, values of another shape or kind, or a row that is none.
    """
    try:
        rows = list(map(operator.index, rows))
    except TypeError:
        raise InputError(f"rows {rows!r}: a list of integers is expected") from None
    checked: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        slot = slots.get(name)
        if slot is None or slot.owner != "device":
            raise InputError(f"slot {name}: only slots with owner='device' are patched; stage() writes the others")
        if any(not 0 <= row < capacity[slot.per] for row in rows):
            raise InputError(f"slot {name}, rows {rows}: the buffers hold rows 0 to {capacity[slot.per] - 1}")
        if rows or not hasattr(value, "__len__") or len(value):  # an empty list has neither dtype nor shape
            checked[name] = torch.as_tensor(slot.checked(len(rows), value))
    return rows, checked if rows else {}
