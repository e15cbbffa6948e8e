"""What recordings say of themselves and of the device's memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stepgraph.runtime import graph_break
from stepgraph.runtime.memory.cost import CostMeter
from stepgraph.runtime.platforms import DeviceMemory, platform_for
from stepgraph.runtime.platforms.cuda_memory import cached_bytes
from stepgraph.runtime.pool import GraphPool

MIB = 1 << 20


def test_nodes_are_counted_by_type(device: torch.device) -> None:
    platform = platform_for(device)
    x = torch.ones(1000, device=device)

    def step() -> torch.Tensor:
        y = torch.zeros_like(x)
        y.copy_(x)
        return (y + 1).sum()

    platform.warm_up(step)
    recording, _ = platform.record(step, platform.new_pool())
    assert sum(recording.node_types.values()) > 2
    if device.type == "cpu":
        assert set(recording.node_types) == {"operator"} and recording.instantiate_seconds == 0
    else:
        assert recording.node_types["kernel"] >= 1 and recording.instantiate_seconds > 0
        if recording.num_nodes is not None:  # cuda.bindings is there
            assert recording.node_types == Counter(node.type for node in recording.nodes())


def test_segments_are_counted_together(device: torch.device) -> None:
    platform = platform_for(device)
    x = torch.ones(8, device=device)
    double = graph_break(lambda t: t * 2, name="double")

    def step() -> torch.Tensor:
        return double(x + 1) + 3

    platform.warm_up(step)
    recording, _ = platform.record_breakable(step, platform.new_pool())
    whole, _ = platform.record(lambda: x + 1, platform.new_pool())
    assert sum(recording.node_types.values()) >= 2 * sum(whole.node_types.values())
    assert (recording.instantiate_seconds > 0) is (device.type == "cuda")


def test_the_meter_tells_pool_and_warm_up_apart(device: torch.device) -> None:
    pool = GraphPool(platform_for(device))
    x = torch.ones(4 * MIB, device=device)

    def step() -> torch.Tensor:
        return x + 1

    meter = CostMeter(pool)
    pool.platform.warm_up(step)
    assert meter.pool_growth() == 0
    meter.warmed_up()
    with pool.alone():
        recording, out = pool.platform.record(step, pool.handle)
    cost = meter.cost(recording)
    assert 16 * MIB <= cost.pool_bytes <= 24 * MIB
    assert cost.warmup_seconds > 0 and cost.capture_seconds > 0
    assert cost.compile_seconds == 0
    assert cost.seconds == cost.warmup_seconds + cost.capture_seconds + cost.instantiate_seconds
    assert 0 <= cost.driver_bytes <= 64 * MIB
    recording.release()
    del out, recording, step
    pool.platform.give_back()
    assert pool.nbytes() == 0


def test_the_meter_tells_compiling_apart_from_warming_up() -> None:
    pool, clock = GraphPool(platform_for("cpu")), iter([100.0, 103.0])
    meter = CostMeter(pool, lambda: next(clock))
    meter.warmed_up()
    with pool.alone():
        recording, _ = pool.platform.record(lambda: torch.ones(2) + 1, pool.handle)
    cost = meter.cost(recording)
    assert cost.compile_seconds == 3.0 and cost.warmup_seconds < -2.9  # of a warm-up that took no time
    recording.release()


@pytest.mark.gpu
@pytest.mark.alone
def test_the_devices_figures() -> None:
    platform = platform_for("cuda")
    before = platform.memory()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    after = platform.memory()
    assert after.allocated - before.allocated == held.numel()
    assert after.total == before.total > after.free and after.reserved >= after.allocated
    assert abs(after.outside - before.outside) <= 4 * MIB  # what torch took is not outside it


def test_outside_is_what_torch_does_not_hold() -> None:
    assert DeviceMemory(total=100, free=40, reserved=35, allocated=20).outside == 25


@pytest.mark.gpu
@pytest.mark.alone
def test_a_first_launch_takes_no_memory() -> None:
    platform = platform_for("cuda")
    x = torch.zeros(1 << 16, device="cuda")

    def step() -> torch.Tensor:
        for _ in range(500):
            x.add_(1)
        return x

    platform.warm_up(step)
    recording, _ = platform.record(step, platform.new_pool())
    platform.synchronize()
    before = platform.memory()
    recording.replay()
    platform.synchronize()
    assert platform.memory().outside - before.outside <= MIB


def test_the_cache_is_what_lies_in_no_tensor_and_in_no_graphs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(total: int, allocated: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, object]:
        return {"device": device, "total_size": total, "allocated_size": allocated, "segment_pool_id": pool}

    segments = [segment(20, 5), segment(8, 8), segment(100, 0, pool=(0, 3)), segment(7, 0, device=1)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert cached_bytes(torch.device("cuda", 0)) == 15


@pytest.mark.gpu
def test_a_freed_tensor_is_in_the_cache() -> None:
    platform = platform_for("cuda")
    platform.give_back()
    before = platform.cached_bytes()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert abs(platform.cached_bytes() - before) <= 2 * MIB
    del held
    assert abs(platform.cached_bytes() - before - 64 * MIB) <= 2 * MIB
