"""The tape as a platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms.tape.recorder import Call, TapeRecorder
from stepgraph.runtime.platforms.tape.refusals import HostReadGuard
from stepgraph.runtime.regions import RegionLog, logging_regions

T = TypeVar("T")


class TapeRecording:
    """A recorded step: the calls, in order, on frozen tensors."""

    def __init__(self, calls: list[Call], nodes: list[GraphNode]) -> None:
        self._calls = calls
        self._nodes: list[GraphNode] | None = nodes
        self.num_nodes: int | None = len(calls)

    def replay(self) -> None:
        # Inference mode also lets a step that was recorded under it be written to again.
        with torch.inference_mode():
            for function, args, kwargs in self._calls:
                function(*args, **kwargs)

    def nodes(self) -> list[GraphNode]:
        if self._nodes is None:
            raise CaptureError("this tape was released; capture again before reading its nodes")
        return list(self._nodes)

    def release(self) -> None:
        self._calls = []
        self._nodes = None


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
        log = RegionLog(recorder.new_calls)
        with recorder, HostReadGuard(), logging_regions(log):
            result = step()
        nodes = [GraphNode(i, "operator", name, log.regions[i]) for i, name in enumerate(recorder.names)]
        return TapeRecording(recorder.finish(), nodes), result

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> DirectCopy:
        return DirectCopy(host, slab)

    def synchronize(self) -> None:
        pass
