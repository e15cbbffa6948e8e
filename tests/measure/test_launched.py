"""Launches of an eager step, from events as Kineto writes them."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stepgraph.measure.trace.kineto import TraceError
from stepgraph.measure.trace.launched import (
    REGION,
    STEP,
    Launch,
    TracedRegions,
    exported_events,
    launches_of,
    trace_step,
)
from stepgraph.runtime.regions import logging_regions, region


def span(cat: str, name: str, start: float, stop: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "tid": thread, "args": args}


def launch(name: str, at: float, correlation: int, kind: str = "kernel", call: str = "cudaLaunchKernel") -> list[Any]:
    """A call at `at`, and what it has the device do 50 µs later."""
    group = "cuda_driver" if call.startswith("cuLaunch") else "cuda_runtime"
    on_device = {"device": 0, "stream": 7, "correlation": correlation}
    return [
        span(group, call, at, at + 1, correlation=correlation),
        span(kind, name, at + 50, at + 52, thread=7, **on_device),
    ]


EVENTS = [
    span("user_annotation", "warm-up", 0, 90),
    span("cpu_op", "aten::linear", 10, 20),
    *launch("early", 12, 1),
    span("user_annotation", STEP, 100, 200),
    span("user_annotation", f"{REGION}layers.0", 110, 150),
    span("user_annotation", f"{REGION}layers.0/qkv", 111, 130),
    span("cpu_op", "aten::linear", 112, 125),
    span("cpu_op", "aten::mm", 113, 124),
    *launch("void gemm<float>(int)", 114, 2),
    *launch("splitKreduce_kernel", 116, 3),
    *launch("_norm", 140, 4, call="cuLaunchKernelEx"),
    span("cpu_op", "aten::copy_", 160, 170),
    *launch("Memcpy DtoD", 165, 5, kind="gpu_memcpy", call="cudaMemcpyAsync"),
    span("cpu_op", "aten::add", 160, 190, thread=2),
    span("cuda_runtime", "cudaDeviceSynchronize", 210, 300, correlation=6),
    *launch("late", 301, 8),
    {"ph": "M", "name": "process_name", "args": {}},
]


def test_each_launch_has_its_region_and_operator() -> None:
    assert launches_of(EVENTS) == [
        Launch("kernel", "void gemm<float>(int)", "layers.0/qkv", "aten::linear"),
        Launch("kernel", "splitKreduce_kernel", "layers.0/qkv", "aten::linear"),
        Launch("kernel", "_norm", "layers.0", ""),
        Launch("memcpy", "Memcpy DtoD", "", "aten::copy_"),
    ]


def test_the_order_of_the_events_is_of_no_account() -> None:
    assert launches_of(EVENTS[::-1]) == launches_of(EVENTS)


def test_a_driver_call_inside_a_runtime_call_launches_once() -> None:
    inner = span("cuda_driver", "cuLaunchKernel", 114.2, 114.8, correlation=2)
    assert launches_of([*EVENTS, inner]) == launches_of(EVENTS)


def test_a_trace_without_the_step_or_without_launches() -> None:
    with pytest.raises(TraceError, match="no annotation 'stepgraph step'"):
        launches_of([event for event in EVENTS if event["name"] != STEP])
    with pytest.raises(TraceError, match="ran nothing on the device"):
        launches_of([span("user_annotation", STEP, 0, 9), *launch("late", 10, 1)])


def test_regions_reach_the_trace() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        record_function(STEP),
        logging_regions(TracedRegions()),
        region("layers.0"),
        region("mlp"),
    ):
        torch.ones(3) + 1
    names = [event["name"] for event in exported_events(profiler) if event.get("cat") == "user_annotation"]
    assert {STEP, f"{REGION}layers.0", f"{REGION}layers.0/mlp"} <= set(names)


def test_a_region_that_fails_is_closed() -> None:
    log = TracedRegions()
    with pytest.raises(ValueError, match="x"), logging_regions(log), region("a"):
        raise ValueError("x")
    assert not log._open and not log._names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(TraceError, match="there is none"):
        trace_step(lambda: None)


@pytest.mark.gpu
def test_a_real_step() -> None:
    x, w = torch.ones(8, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    ran = []

    def step() -> None:
        with region("layers.0"), region("product"):
            y = x @ w
        y.relu_()

    found = trace_step(step, lambda: ran.append(1))
    assert len(ran) == 2
    assert [one.operator for one in found if one.region == "layers.0/product"][0] == "aten::matmul"
    assert (found[-1].region, found[-1].operator, found[-1].type) == ("", "aten::relu_", "kernel")
