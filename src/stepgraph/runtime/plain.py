"""Plain values that a break returns, which the segments behind it have built in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.runtime.errors import CaptureError

_COMPARED = (
    *(bool, int, float, complex, str, bytes, type(None), range, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def kept_value(value: Any, arguments: Sequence[Any]) -> Any:
    """What the value of a replay is compared with. An array or a set is copied, since it may change in place.

    arguments: of the break; one of them is the same object at every replay, so it may be returned whatever it is.

    Raises:
        CaptureError: an object that could not be compared.
    """
    if _comparable(value):
        return value.copy() if isinstance(value, np.ndarray | set) else value
    if any(value is argument for argument in arguments):
        return value
    raise CaptureError(
        f"returns a {type(value).__name__}, which a replay could not compare with the recorded one; return tensors and "
        f"plain values, in tuples, lists and dicts"
    )


def same_value(held: Any, value: Any) -> bool:
    """Whether what the segments have built in is still so. NaN is the same as NaN, -0.0 is not the same as 0.0."""
    if held is value and not isinstance(held, np.ndarray | set):
        return True
    if type(held) is not type(value) or not _comparable(held):
        return False
    if isinstance(held, np.ndarray):
        numbers = held.dtype.kind in "fc"
        return held.dtype == value.dtype and bool(np.array_equal(held, value, equal_nan=numbers))
    if isinstance(held, float | complex | np.generic):
        return repr(held) == repr(value)
    return bool(held == value)


def _comparable(value: Any) -> bool:
    if isinstance(value, slice):
        return all(isinstance(end, _COMPARED) for end in (value.start, value.stop, value.step))
    if isinstance(value, set | frozenset):
        return all(map(_comparable, value))
    return isinstance(value, _COMPARED) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
