"""The tape as a platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stepgraph.runtime.breakable import BreakableRecording
from stepgraph.runtime.capture_guard import refuse_capture_while_serving
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms.base import LoopTerms
from stepgraph.runtime.platforms.refusals import HostReadGuard
from stepgraph.runtime.platforms.segments import record_segments, record_whole
from stepgraph.runtime.platforms.tape.pool import TapePool
from stepgraph.runtime.platforms.tape.recorder import Call, TapeRecorder
from stepgraph.runtime.regions import RegionLog, logging_regions

T = TypeVar("T")


class TapeRecording:
    """A recorded step: the calls, in order, on frozen tensors."""

    def __init__(self, calls: list[Call], nodes: list[GraphNode]) -> None:
        self._calls = calls
        self._nodes: list[GraphNode] | None = nodes
        self.num_nodes: int | None = len(calls)
        self.node_types: Mapping[str, int] = {"operator": len(calls)} if calls else {}
        self.instantiate_seconds = 0.0
        self._loop: Callable[[], None] | None = None

    def replay(self) -> None:
        # Inference mode also lets a step that was recorded under it be written to again.
        with torch.inference_mode():
            for function, args, kwargs in self._calls:
                function(*args, **kwargs)

    def loop(self, terms: LoopTerms) -> Callable[[], None]:
        if self._nodes is None:
            raise CaptureError("this tape was released; capture again before making a loop of it")
        if self._loop is None:
            self._loop = partial(self._replay_until_it_halts, terms)
        return self._loop

    def _replay_until_it_halts(self, terms: LoopTerms) -> None:
        terms.control.zero_()
        for run in range(1, terms.most + 1):
            self.replay()
            terms.control[1] = terms.told[0] = run
            if terms.halt:
                return

    def nodes(self) -> list[GraphNode]:
        if self._nodes is None:
            raise CaptureError("this tape was released; capture again before reading its nodes")
        return list(self._nodes)

    def release(self) -> None:
        self._calls = []
        self._nodes = self._loop = None


class TapeSegments:
    """Cuts one recorder's calls into recordings."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self.log = RegionLog(recorder.new_calls)
        self._recorder = recorder
        self.aside = recorder.aside
        self.alias = recorder.alias

    def open(self) -> None:
        pass  # the recorder goes on by itself

    def close(self) -> TapeRecording | None:
        recording = self.cut()
        return recording if recording.num_nodes else None

    def cut(self) -> TapeRecording:
        """A recording of what was recorded since the last cut."""
        self.log.settle()
        calls, names = self._recorder.cut()
        regions, self.log.regions = self.log.regions, {}
        return TapeRecording(calls, [GraphNode(i, "operator", name, regions[i]) for i, name in enumerate(names)])

    def place(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            placed = torch.empty_like(result).copy_(result)
        self._recorder.own(placed)
        return placed, placed


class DirectCopy:
    """On a CPU the host's bytes and the slab are both plain memory."""

    def __init__(self, host: torch.Tensor, slab: torch.Tensor) -> None:
        self._host, self._slab = host.numpy(), slab.numpy()

    def upload(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, stop in ranges:
            self._slab[start:stop] = self._host[start:stop]


class NoMark:
    """On a CPU what was called is done."""

    def set(self) -> None:
        pass

    def wait(self) -> None:
        pass


class TapePlatform:
    """Records operators on the CPU and replays them. See docs/tape.md for what it cannot see."""

    name = "tape"
    device = torch.device("cpu")

    def new_pool(self) -> TapePool:
        return TapePool()

    def pool_bytes(self, pool: TapePool) -> int:
        return pool.nbytes()

    def memory(self) -> None:
        return None

    def cached_bytes(self) -> int:
        return 0

    def give_back(self) -> None:
        pass  # storages go with the last tensor over them

    def warm_up(self, step: Callable[[], T]) -> T:
        return step()

    def record(self, step: Callable[[], T], pool: TapePool | None) -> tuple[TapeRecording, T]:
        refuse_capture_while_serving()
        recorder = TapeRecorder(pool)
        segments = TapeSegments(recorder)
        with recorder, HostReadGuard(lambda: False), logging_regions(segments.log):
            result = step()
        recording = segments.cut()
        recorder.finish()
        return recording, result

    def record_breakable(
        self, step: Callable[[], T], pool: TapePool | None, *, every_op: bool = False
    ) -> tuple[BreakableRecording, T]:
        refuse_capture_while_serving()
        recorder = TapeRecorder(pool)
        segments = TapeSegments(recorder)
        with recorder, HostReadGuard(lambda: recorder.paused), logging_regions(segments.log):
            parts, result = record_segments(segments, step, every_op=every_op)
        recorder.finish()
        return BreakableRecording(parts), result

    def record_eager(self, step: Callable[[], T]) -> tuple[BreakableRecording, T]:
        refuse_capture_while_serving()
        return record_whole(step)

    def host_mirror(self, host: torch.Tensor, slab: torch.Tensor) -> DirectCopy:
        return DirectCopy(host, slab)

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(False):  # steps write it in and outside of that mode
            memory = torch.zeros(shape, dtype=dtype)
        return memory, memory

    def mark(self, *, asleep: bool = False) -> NoMark:
        return NoMark()

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def synchronize(self) -> None:
        pass
