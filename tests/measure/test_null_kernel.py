"""Null kernels through the driver: against a driver of straw here, and the real one on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgraph.measure import null_kernel
from stepgraph.measure.null_kernel import NullGraph, can_be_programmatic, null_launcher
from stepgraph.runtime.errors import ConfigError


class Driver:
    """Notes what is called, and refuses what `failing` names."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []
        self.configs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuLaunchKernelEx":
                self.configs.append(arguments[0]._obj)
            return 700 if name == self.failing else 0

        return call


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(getattr(request, "param", ""))
    monkeypatch.setattr(null_kernel, "libcuda", lambda: found)
    monkeypatch.setattr(null_kernel, "_function", lambda device, waits: ctypes.c_void_p(5))
    monkeypatch.setattr(null_kernel, "upload", lambda executable, stream: found.calls.append("upload"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132))
    return found


def test_structures_have_the_drivers_layout() -> None:
    assert ctypes.sizeof(null_kernel._Attribute) == 72 and null_kernel._Attribute.value.offset == 8
    assert ctypes.sizeof(null_kernel._Config) == 56 and null_kernel._Config.stream.offset == 32


def test_a_launch_has_a_block_for_each_multiprocessor(driver: Driver) -> None:
    null_launcher(7)()
    null_launcher(7, waits=True, programmatic=True)()
    plain, programmatic = driver.configs
    assert list(plain.grid) == [132, 1, 1] and list(plain.block) == [128, 1, 1] and plain.stream == 7
    assert (plain.num_attributes, programmatic.num_attributes) == (0, 1)
    attribute = programmatic.attributes.contents
    assert attribute.id == 6 and attribute.value[0] == 1


def test_a_graph_is_captured_instantiated_and_uploaded_in_this_order(driver: Driver) -> None:
    graph = NullGraph(null_launcher(7), 3, 7)
    assert driver.calls == [
        "cuStreamBeginCapture_v2", *["cuLaunchKernelEx"] * 3, "cuStreamEndCapture", "cuGraphInstantiateWithFlags",
        "upload", "cuStreamSynchronize",
    ]  # fmt: skip
    assert min(graph.capture_us, graph.instantiate_us, graph.upload_us) > 0
    graph.close()
    assert driver.calls[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"]


@pytest.mark.parametrize("driver", ["cuLaunchKernelEx"], indirect=True)
def test_a_refused_launch_ends_the_capture(driver: Driver) -> None:
    with pytest.raises(ConfigError, match="refuses to launch a null kernel: error 700"):
        NullGraph(null_launcher(7), 3, 7)
    assert driver.calls[-1] == "cuStreamEndCapture"


@pytest.mark.parametrize(
    "driver", ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"], indirect=True
)
def test_what_the_driver_refuses_is_said(driver: Driver) -> None:
    with pytest.raises(ConfigError, match="the driver refuses to .*: error 700"):
        NullGraph(null_launcher(7), 1, 7).launch()


@pytest.mark.gpu
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_real_graph_has_the_edges_asked_for(programmatic: bool) -> None:
    if programmatic and not can_be_programmatic():
        pytest.skip("needs compute capability 9.0")
    stream = torch.cuda.Stream()
    launch = null_launcher(stream.cuda_stream, waits=programmatic, programmatic=programmatic)
    launch()
    graph = NullGraph(launch, 20, stream.cuda_stream)
    graph.launch()
    stream.synchronize()
    assert graph.programmatic_edges() == (19 if programmatic else 0)
    graph.close()
