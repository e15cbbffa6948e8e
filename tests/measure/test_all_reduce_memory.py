"""What is summed in a graph is there at every replay, though graphs hold addresses only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measure.graph_memory import AddressPlatform

from stepgraph.comm.all_reduce import AllReduce
from stepgraph.comm.errors import CommError
from stepgraph.measure.all_reduce import stress as stress_module
from stepgraph.measure.all_reduce import timing
from stepgraph.measure.all_reduce.ways import Way


class Group:
    """A rank by itself."""

    device, world, rank = torch.device("cpu"), 1, 0

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        pass

    def agree(self, what: str, value: Any) -> None:
        pass

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def check(self) -> None:
        pass


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> AddressPlatform:
    platform = AddressPlatform()
    for module in (stress_module, timing):
        monkeypatch.setattr(module, "platform_for", lambda device: platform)
    monkeypatch.setattr(timing, "_sample_us", lambda group, run: run.launch() or 1.0)
    return platform


def all_reduce() -> AllReduce:
    return AllReduce(Group(), why_library="a CPU")  # type: ignore[arg-type]


def way(name: str, *, captured: bool) -> Way:
    def prepare(nbytes: int) -> Callable[[], object]:
        x = torch.zeros(nbytes)
        return lambda: x.add_(1)

    return Way(name, captured, prepare)


def test_patterns_outlive_the_replays(platform: AddressPlatform) -> None:
    stress_module.stress(Group(), all_reduce(), captured=2000, graphs=4, most_bytes=1024)  # type: ignore[arg-type]
    assert len(platform.recordings) == 4 and all(one.replays for one in platform.recordings)


def test_the_inputs_of_ways_outlive_the_replays(platform: AddressPlatform) -> None:
    ways = [way("first", captured=True), way("second", captured=True), way("second", captured=False)]
    times = timing.time_ways(Group(), all_reduce(), ways, 64, samples=3)  # type: ignore[arg-type]
    assert {key: len(took) for key, took in times.items()} == {
        ("first", True): 3, ("second", True): 3, ("second", False): 3
    }  # fmt: skip
    assert [one.replays for one in platform.recordings] == [4, 4]


def test_a_way_that_fails_is_named(platform: AddressPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(nbytes: int) -> Callable[[], object]:
        def once() -> None:
            monkeypatch.setattr(platform, "synchronize", fails)

        return once

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")

    ways = [way("right", captured=True), Way("wrong", False, illegal), way("right", captured=False)]
    with pytest.raises(CommError, match=r"wrong, eager, 64 bytes: CUDA error: an illegal memory access .*encountered$"):
        timing.time_ways(Group(), all_reduce(), ways, 64, samples=3)  # type: ignore[arg-type]
