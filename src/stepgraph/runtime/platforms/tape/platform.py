"""The tape as a platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from stepgraph.runtime.platforms.tape.recorder import Call, TapeRecorder
from stepgraph.runtime.platforms.tape.refusals import HostReadGuard

T = TypeVar("T")


class TapeRecording:
    """A recorded step: the calls, in order, on frozen tensors."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self.num_nodes: int | None = len(calls)

    def replay(self) -> None:
        # Inference mode also lets a step that was recorded under it be written to again.
        with torch.inference_mode():
            for function, args, kwargs in self._calls:
                function(*args, **kwargs)

    def release(self) -> None:
        self._calls = []


class DirectCopy:
    """On a CPU the host's bytes and the slab are both plain memory."""

    def __init__(self, host: torch.Tensor, slab: torch.Tensor) -> None:
        self._host, self._slab = host.numpy(), slab.numpy()

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            self._slab[start:stop] = self._host[start:stop]


class TapePlatform:
    """Records operators on the CPU and replays them. See docs/tape.md for what it cannot see."""

    name = "tape"
    device = torch.device("cpu")

    def new_pool(self) -> None:
        return None  # every recording holds its own storages

    def warm_up(self, step: Callable[[], T]) -> T:
        return step()

    def record(self, step: Callable[[], T], pool: None) -> tuple[TapeRecording, T]:
        recorder = TapeRecorder()
        with recorder, HostReadGuard():
            result = step()
        return TapeRecording(recorder.finish()), result

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> DirectCopy:
        return DirectCopy(host, slab)

    def synchronize(self) -> None:
        pass
