"""EntryRing: entries are written where they belong, and none is overwritten before the device has read it."""

import random

import numpy as np
import torch

from stepgraph.runtime.entries import EntryRing
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.tape import TapePlatform


def put(ring: EntryRing, places: list[int], values: list[int]) -> None:
    ring.put(np.array(places, dtype=np.int64), np.array(values, dtype=np.int64))


def test_entries_of_any_number(device: torch.device) -> None:
    target, want, rng = torch.zeros(40, 50, dtype=torch.int32, device=device), [0] * 2000, random.Random(0)
    ring = EntryRing(platform_for(device), target)
    for step, count in enumerate((1, 256, 256, 256, 3, 0, 257, 2000, 5, 5, 5)):
        places = rng.sample(range(2000), count)
        with torch.inference_mode(step % 2 == 0):
            put(ring, places, [step * 2000 + place for place in places])
        for place in places:
            want[place] = step * 2000 + place
    assert target.flatten().tolist() == want


class SlowMark:
    """Of a device that runs what it was given only once it is waited for."""

    def __init__(self, queue: list) -> None:
        self._queue, self._behind = queue, 0

    def set(self) -> None:
        self._behind = len(self._queue)

    def wait(self) -> None:
        for at in range(self._behind):
            if self._queue[at] is not None:
                self._queue[at]()
                self._queue[at] = None


class SlowTarget:
    """Written by such a device, which reads the entries only then."""

    dtype = torch.int32

    def __init__(self, queue: list) -> None:
        self.queue, self.values = queue, torch.zeros(1000, dtype=torch.int32)

    def view(self, *shape: int) -> "SlowTarget":
        return self

    def index_copy_(self, dim: int, places: torch.Tensor, values: torch.Tensor) -> None:
        self.queue.append(lambda: self.values.index_copy_(dim, places, values))


class SlowPlatform(TapePlatform):
    def __init__(self, queue: list) -> None:
        self._queue = queue

    def mark(self, *, asleep: bool = False) -> SlowMark:
        return SlowMark(self._queue)


def test_entries_that_are_still_to_be_read_are_not_overwritten() -> None:
    queue: list = []
    target = SlowTarget(queue)
    ring = EntryRing(SlowPlatform(queue), target)
    for step in range(20):
        count = 40 if step < 15 else 400  # more than ever: the memory is given up
        put(ring, list(range(step, step + count)), [step + 1] * count)
        assert sum(run is not None for run in queue) in (1, 2)
    for run in queue:
        if run is not None:
            run()
    assert target.values[:20].tolist() == list(range(1, 21)) and target.values[418] == 20
