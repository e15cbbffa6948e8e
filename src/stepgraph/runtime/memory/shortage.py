"""Out of memory: how much was missing, and what to lower by how much."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.memory.units import in_units
from stepgraph.runtime.naming import count, describe, size_of
from stepgraph.runtime.platforms import DeviceMemory

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def remedy(
    error: Exception,
    key: BatchDescriptor,
    keys: Iterable[BatchDescriptor],
    memory: DeviceMemory | None,
    stays: int = 0,
) -> str:
    """Why a key that ran out of memory was dropped: what was missing, and what to lower and by how much.

    keys: of the whole session, of which smaller ones of the same kind may still fit. memory: after the failure.
    stays: bytes that it has left in a pool which had graphs before.
    """
    phase, unit = ("decode", "request") if key.is_uniform else ("prefill", "token")
    kind = [size_of(k) for k in keys if (k.query_len, k.num_loras) == (key.query_len, key.num_loras)]
    smaller = [size for size in kind if size < size_of(key)]
    ladder = f"end the {phase} ladder at {count(max(smaller), unit)}" if smaller else f"capture fewer {phase} sizes"
    what = f"out of memory while capturing {describe(key)}"
    if stays > 0:
        what += f" ({in_units(stays)} stay in the pool, where later sizes use them, until recapture())"
    asked = asked_for(error)
    if asked is None or memory is None:
        return f"{what}; {ladder}, or give the KV cache less memory (fewer blocks)"
    missing = max(asked - memory.free, 0)
    said = f"{what}: {in_units(asked)} were asked for and {in_units(memory.free)} are free; {ladder}"
    if missing > memory.total:
        return said
    return (
        f"{said}, or give the KV cache at least {in_units(missing)} less (fewer blocks, or a memory fraction lower by "
        f"{max(missing / memory.total, 1e-3):.3f})"
    )


def asked_for(error: Exception) -> int | None:
    """Bytes of the allocation that failed, as torch tells it. None where it does not."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
