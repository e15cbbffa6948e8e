"""Where slots lie in one allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from stepgraph.runtime.slots import Slot, Unit

Span = tuple[int, int]
"""The bytes from start up to stop."""

_ALIGNMENT = 256  # bytes; what CUDA's allocator aligns to, so that vector loads of a slot stay aligned


def pack(slots: Iterable[Slot], rows: Mapping[Unit, int]) -> tuple[dict[str, Span], int]:
    """Each slot's span, in the order given, and the bytes of all. rows: of a slot, by what its rows count."""
    spans: dict[str, Span] = {}
    end = 0
    for slot in slots:
        nbytes = rows[slot.per] * math.prod(slot.shape) * slot.dtype.itemsize
        spans[slot.name] = (end, end + nbytes)
        end = _aligned(end + nbytes)
    return spans, end


def joined(spans: Iterable[Span]) -> list[Span]:
    """Ascending spans, with neighbours made one."""
    ranges: list[Span] = []
    for start, stop in spans:
        if ranges and _aligned(ranges[-1][1]) == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _aligned(offset: int) -> int:
    """The next offset at which a slot may start, in bytes."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
