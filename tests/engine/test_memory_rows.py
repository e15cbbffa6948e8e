"""The engine's rows: what is planned is what is there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engine.tiny import CONFIG, tiny_engine, tiny_graphs
from runtime.fake_virtual import FakeVirtualMemory

from stepgraph.engine.memory_rows import engine_rows, planned_rows
from stepgraph.runtime import Ladder
from stepgraph.runtime.memory.ledger import Captured, make_ledger
from stepgraph.runtime.platforms import DeviceMemory

MIB = 1 << 20


def test_what_follows_from_the_configuration_is_what_is_there(device: torch.device) -> None:
    core = tiny_engine(device)
    found = {row.name: row.nbytes for row in engine_rows(core)}
    buffers = core.buffers
    planned = planned_rows(
        CONFIG,
        core.model.dtype,
        max_requests=buffers.max_requests,
        max_tokens=buffers.max_tokens,
        max_len=256,
        penalties=True,
    )
    for row in planned:
        assert found[row.name] == row.nbytes, row.name
    assert found["KV cache"] == core.kv_cache.nbytes


def test_rows_that_are_not_there_are_left_out() -> None:
    names = {row.name for row in engine_rows(tiny_engine(penalties=False, graphs="disabled"))}
    assert names == {"weights and rotary tables", "KV cache", "static buffers"}


def test_ten_start_ups_leave_nothing_in_the_pool() -> None:
    pools = []
    for _ in range(10):
        core = tiny_engine(max_num_seqs=2, chunk_tokens=4)
        ledger = make_ledger([Captured(core.runner.capture_report)], engine_rows(core))
        pools.append(core.runner.pool._handle)
        assert pools[-1].nbytes() == sum(family.pool_bytes for family in ledger.families().values()) > 0
        del core, ledger
        gc.collect()
    assert [pool.nbytes() for pool in pools] == [0] * 10


@pytest.mark.gpu
@pytest.mark.alone
def test_ten_start_ups_leave_nothing_on_the_device() -> None:
    """No kernel, workspace or graph of an earlier engine stays once the first has loaded what all share."""
    used = []
    for _ in range(11):
        core = tiny_engine("cuda", max_num_seqs=4)
        platform = core.runner.pool.platform
        core.runner.release()
        del core
        gc.collect()
        platform.give_back()
        memory = platform.memory()
        assert memory is not None
        used.append(memory.total - memory.free)
    assert max(used[1:]) - used[0] <= 1 << 20


def test_logits_lie_in_the_pool_of_the_first_graph() -> None:
    def of(graphs: str) -> list[str]:
        return [row.of for row in engine_rows(tiny_engine(graphs=graphs)) if row.of]

    assert of("full") == ["prefill graphs: pool"] and of("FULL_DECODE_ONLY") == ["decode graphs: pool"]


def test_of_the_cache_only_what_came_after_the_capture_is_later() -> None:
    core = tiny_engine(num_blocks=300, memory=FakeVirtualMemory())
    at_capture = core.kv_memory.nbytes
    assert at_capture > 0
    for blocks in (200, 100):
        core.resize_kv(blocks)
        row = next(row for row in engine_rows(core) if row.name == "KV cache")
        assert (row.nbytes, row.later, row.in_torch) == (core.kv_memory.nbytes, row.nbytes - at_capture, False)


class Device:
    """A platform with figures: each look at them finds a MiB more outside torch, and two in tensors."""

    def __init__(self, platform: Any) -> None:
        self._platform, self._looks = platform, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def memory(self) -> DeviceMemory:
        self._looks += 1
        return DeviceMemory(1000 * MIB, (1000 - 3 * self._looks) * MIB, 2 * self._looks * MIB, 2 * self._looks * MIB)

    def cached_bytes(self) -> int:
        return 5 * MIB


def test_what_eager_steps_and_warm_ups_leave_has_rows() -> None:
    core = tiny_engine(graphs="disabled", max_num_seqs=2)
    core.runner.config = tiny_graphs("FULL_DECODE_ONLY", Ladder.explicit([1, 2]), max_num_seqs=2)
    platform = core.runner.pool.platform = Device(core.runner.pool.platform)
    core.capture()
    outputs = core.runner.output_bytes
    rows = {row.name: row for row in engine_rows(core)}
    assert rows["workspaces of libraries"].nbytes == 2 * 2 * MIB - outputs  # of two sizes' warm-ups
    assert rows["torch: its cache"].nbytes == 5 * MIB and "driver: loaded by eager steps" not in rows
    core.run_largest_step()
    rows = {row.name: row for row in engine_rows(core)}
    assert rows["workspaces of libraries"].nbytes == 3 * 2 * MIB - outputs
    loaded = rows["driver: loaded by eager steps"]
    assert loaded.nbytes == loaded.later == MIB and not loaded.in_torch
    assert make_ledger([Captured(core.runner.capture_report)], [*rows.values()], platform.memory()).residual is not None
