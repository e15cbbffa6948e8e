"""The engine's rows: what is planned is what is there."""

from __future__ import annotations

import gc

import pytest
import torch
from engine.tiny import CONFIG, tiny_engine

from stepgraph.engine.memory_rows import engine_rows, planned_rows
from stepgraph.runtime.memory.ledger import Captured, make_ledger


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
