"""Regions: every node of a recording knows what the step called the place that recorded it. On both platforms."""

import threading
from collections import Counter

import pytest
import torch

from stepgraph.runtime import BatchDescriptor, CaptureError, GraphConfig, GraphRunner, Ladder, PaddingPolicy, Slot
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.errors import InputError
from stepgraph.runtime.platforms import Platform, platform_for
from stepgraph.runtime.regions import region


@pytest.fixture
def platform(device: torch.device) -> Platform:
    if device.type == "cuda":
        pytest.importorskip("cuda.bindings.driver")
    return platform_for(device)


def record(platform: Platform, step):
    with torch.no_grad():
        platform.warm_up(step)
        return platform.record(step, platform.new_pool())[0]


def regions(recording) -> list[str]:
    return [node.region for node in recording.nodes()]


def test_every_node_has_the_path_of_its_regions(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)

    def step() -> torch.Tensor:
        y = x + 1
        for layer in range(2):
            with region(f"layers.{layer}"):
                y = y * 2
                with region("norm"):
                    y = y + 3
                    y = y * 4
                y = y - 1
        return y.neg()

    recording = record(platform, step)
    layer = ["layers.{0}", "layers.{0}/norm", "layers.{0}/norm", "layers.{0}"]
    assert regions(recording) == ["", *(r.format(i) for i in range(2) for r in layer), ""]
    assert recording.num_nodes == len(recording.nodes()) == 10
    assert [node.index for node in recording.nodes()] == list(range(10))
    assert all(node.name for node in recording.nodes())


def test_a_region_that_recurs_or_records_nothing(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)

    def step() -> torch.Tensor:
        with region("a"), region("b"):
            view = x.view(2, 2)[0]
        with region("a"):
            y = view + 1
        y = y * 2
        with region("a"):
            return y + 1

    assert regions(record(platform, step)) == ["a", "", "a"]


def test_outside_a_recording_a_region_does_nothing(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)
    with region("outside"):
        recording = record(platform, lambda: x + 1)
    assert regions(recording) == [""]


def test_an_error_inside_a_region_leaves_nothing_open(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)

    def refused() -> float:
        with region("a"), region("b"):
            return (x + 1).sum().item()

    def own() -> None:
        with region("a"):
            raise KeyError("mine")

    for step, error in ((refused, CaptureError), (own, KeyError)):
        with pytest.raises(error), torch.no_grad():
            platform.record(step, platform.new_pool())
    assert regions(record(platform, lambda: x + 1)) == [""]


def test_a_region_of_another_thread_is_not_noted(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)

    def elsewhere() -> None:
        with region("elsewhere"):
            pass

    def step() -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        y = x + 1
        thread.start()
        thread.join()
        return y * 2

    assert regions(record(platform, step)) == ["", ""]


def test_a_released_recording_has_no_nodes(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)
    recording = record(platform, lambda: x + 1)
    recording.release()
    with pytest.raises(CaptureError, match="released"):
        recording.nodes()


def make_runner(device: torch.device, config: GraphConfig) -> GraphRunner:
    slots = [Slot("x", torch.float32, "request", PaddingPolicy.ZERO)]
    buffers = StaticBuffers(max_requests=8, device=device, slots=slots)

    def step(x: torch.Tensor) -> torch.Tensor:
        with region("double"):
            return x * 2

    return GraphRunner(step, buffers, config)


def test_a_runner_tells_the_nodes_of_a_batch(platform: Platform) -> None:
    runner = make_runner(platform.device, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([2, 8])))
    runner.capture()
    nodes = runner.graph_nodes(5)
    assert Counter(node.region for node in nodes)["double"] == 1
    key = BatchDescriptor.decode(8)
    assert nodes == runner.graph(key).recording.nodes()
    with pytest.raises(InputError, match="9 requests"):
        runner.graph_nodes(9)


def test_a_batch_without_a_graph_says_why(platform: Platform) -> None:
    runner = make_runner(platform.device, GraphConfig.preset("NONE"))
    with pytest.raises(CaptureError, match="no graph runs a batch of 3 requests: graphs are disabled"):
        runner.graph_nodes(3)
