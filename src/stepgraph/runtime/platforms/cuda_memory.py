"""What CUDA's driver and torch's allocator say of a device's memory."""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.runtime.platforms.base import DeviceMemory

_NO_POOL = (0, 0)


def device_memory(device: torch.device) -> DeviceMemory:
    """Asks the driver and the allocator; waits for nothing. Two free figures differ by what was taken between them."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    sizes = {name: int(stats[f"{name}_bytes"]["all"]["current"]) if stats else 0 for name in ("reserved", "allocated")}
    return DeviceMemory(total, free, **sizes)


def cached_bytes(device: torch.device) -> int:
    """Bytes of the allocator's segments that are in no tensor, graph pools left out."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) == _NO_POOL
    )


def let_go_of(pool: Any, device: torch.device) -> bool:
    """Take a user off a pool that has none and is still held for one: a capture that failed in older torch.

    To be called after `empty_cache()`, which returns the memory of pools without users. Returns whether another one
    will now return more.
    """
    held = [one for one in torch.cuda.memory_snapshot(pool) if tuple(one["segment_pool_id"]) == tuple(pool)]
    if not held or any(one["allocated_size"] for one in held):
        return False
    torch._C._cuda_releasePool(device.index, pool)
    return True


def pool_segments(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of each segment that a graph pool has taken from the device."""
    return [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot(pool)
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    ]
