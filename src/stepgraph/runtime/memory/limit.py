"""For tests and benchmarks: a platform on which one recording asks for more memory than there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepgraph.runtime.platforms import Platform

MORE_THAN_THERE_IS = 1 << 44  # bytes
_TOO_MUCH = 1 << 30  # bytes beyond what a device has


class OutOfMemoryAt:
    """A platform whose `at`-th recording (from 1) runs out of memory behind the step, in the allocator itself.

    It asks for 1 GiB more than a device has left.

    ballast: bytes that the step gets before that, so that the pool has grown by then.
    """

    def __init__(self, platform: Platform, at: int, ballast: int = 0) -> None:
        self._platform, self._at, self._ballast = platform, at, ballast
        self.recorded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def record(self, step: Callable[[], Any], pool: Any) -> Any:
        self.recorded += 1
        if self.recorded != self._at:
            return self._platform.record(step, pool)
        memory = self._platform.memory()
        asked = MORE_THAN_THERE_IS
        if memory is not None:
            asked = memory.free + self._platform.cached_bytes() + _TOO_MUCH

        def greedy() -> Any:
            result = step()
            held = torch.empty(self._ballast, dtype=torch.uint8, device=self.device)
            try:
                torch.empty(asked, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a CPU has no type of its own for it
                raise torch.OutOfMemoryError("Tried to allocate 16384.00 GiB.") from error
            return result, held

        return self._platform.record(greedy, pool)
