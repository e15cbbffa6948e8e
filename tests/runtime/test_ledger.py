"""The ledger: every byte has a row, and what has none is the residual."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from runtime.sums import sums_runner

from stepgraph.runtime import BatchDescriptor, CaptureReport, DecodePhase, GraphConfig, Ladder, Mode
from stepgraph.runtime.capture import CapturedGraph
from stepgraph.runtime.config import Backend, PrefillPhase
from stepgraph.runtime.memory.cost import CaptureCost
from stepgraph.runtime.memory.ledger import Captured, Row, family, make_ledger
from stepgraph.runtime.memory.units import in_units
from stepgraph.runtime.platforms import DeviceMemory, platform_for

MIB = 1 << 20


def cost(pool: int, driver: int, loaded: int = 0, nodes: int = 10) -> CaptureCost:
    return CaptureCost(pool, driver, loaded, 0, {"kernel": nodes, "memcpy": 1}, 0.1, 0.2, 0.05, 2.0)


def report(costs: dict[BatchDescriptor, CaptureCost], before: DeviceMemory | None = None) -> CaptureReport:
    graphs = {key: CapturedGraph(key, Mode.FULL, None, {}, one) for key, one in costs.items()}  # type: ignore[arg-type]
    return CaptureReport(graphs, before=before)


KEYS = {
    BatchDescriptor.relaxed(512): cost(300 * MIB, 2 * MIB, 5 * MIB),
    BatchDescriptor.decode(64): cost(20 * MIB, 2 * MIB),
    BatchDescriptor.decode(32): cost(0, 0),
}


def test_families_have_sglangs_names() -> None:
    keys = (BatchDescriptor.relaxed(8), BatchDescriptor.decode(4), BatchDescriptor.decode(4, 3))
    assert [family(key) for key in keys] == ["prefill", "decode", "target_verify"]
    assert [family(key, draft=True) for key in keys] == ["draft_prefill", "draft_decode", "draft_extend"]


def test_rows_and_residual_make_the_devices_figure() -> None:
    """8 GiB of weights, a cache of 4 GiB mapped for the most part after the capture, and 7 MiB that nobody names.

    3 of these are in a tensor."""
    gib = 1 << 30
    start = DeviceMemory(total=100 * gib, free=99 * gib, reserved=0, allocated=0)
    before = DeviceMemory(100 * gib, 91 * gib - 6 * MIB, 8 * gib, 8 * gib)  # 2 MiB of the cache, 4 loaded
    outside = start.outside + 4 * gib + (4 + 5 + 4 + 4) * MIB
    reserved = 8 * gib + (320 + 7 + 3) * MIB
    now = DeviceMemory(100 * gib, 100 * gib - outside - reserved, reserved, 8 * gib)
    cache = Row("KV cache", 4 * gib, in_torch=False, later=4 * gib - 2 * MIB)
    ledger = make_ledger(
        [Captured(report(KEYS, before))], [Row("weights", 8 * gib), Row("torch: its cache", 7 * MIB), cache], now, start
    )
    rows = {row.name: row.nbytes for row in ledger.rows}
    assert rows["prefill graphs: pool"] == 300 * MIB and rows["decode graphs: driver"] == 2 * MIB
    assert rows["driver: loaded before the capture"] == 4 * MIB and rows["driver: loaded by warm-ups"] == 5 * MIB
    assert rows["driver: context, and other processes"] == gib
    assert ledger.residual == 7 * MIB and ledger.total + ledger.residual == now.total - now.free
    assert json.loads(json.dumps(ledger.as_dict()))["residual_bytes"] == 7 * MIB


def test_without_a_start_the_capture_is_it() -> None:
    before = DeviceMemory(1000 * MIB, 900 * MIB, 60 * MIB, 60 * MIB)
    now = DeviceMemory(1000 * MIB, 900 * MIB - 329 * MIB, 380 * MIB, 60 * MIB)
    ledger = make_ledger([Captured(report(KEYS, before))], [Row("weights", 60 * MIB)], now)
    assert ledger.residual == 0
    assert {row.name: row.nbytes for row in ledger.rows}["driver: loaded before the capture"] == 0


def test_a_part_of_a_row_is_not_added_twice() -> None:
    ledger = make_ledger([Captured(report(KEYS))], [Row("logits", MIB, of="decode graphs: pool")])
    assert ledger.total == 320 * MIB and ledger.residual is None


def test_families_add_up_their_graphs() -> None:
    families = make_ledger([Captured(report(KEYS)), Captured(report(KEYS), draft=True)]).families()
    assert list(families) == ["prefill", "decode", "draft_prefill", "draft_decode"]
    decode = families["decode"]
    assert (decode.graphs, decode.pool_bytes, decode.nodes) == (2, 20 * MIB, {"kernel": 20, "memcpy": 2})
    assert decode.capture_seconds == pytest.approx(0.4)


def test_of_a_real_capture(device: torch.device) -> None:
    config = GraphConfig(
        decode=DecodePhase(Backend.FULL, Ladder.explicit([1, 8]), (1, 4)),
        prefill=PrefillPhase(Backend.BREAKABLE, Ladder.explicit([8, 32])),
    )
    platform = platform_for(device)
    gc.collect()
    platform.give_back()
    before, cached = platform.memory(), platform.cached_bytes()
    runner = sums_runner(config, device)
    named = [
        Row("of others", 0 if before is None else before.reserved - cached),
        Row("static buffers", runner.buffers.slab.nbytes),
        Row("shared outputs", runner.output_bytes),
        Row("torch: its cache", platform.cached_bytes()),
    ]
    ledger = make_ledger([Captured(runner.capture_report)], named, platform.memory())
    assert {name: one.graphs for name, one in ledger.families().items()} == {
        "prefill": 2,
        "decode": 2,
        "target_verify": 2,
    }
    assert runner.output_bytes == 4 * (8 + 32)  # sums a request, looked_up a token
    assert all(sum(one.nodes.values()) > 0 and one.seconds > 0 for _, _, one in ledger.graphs)
    pools = sum(family.pool_bytes for family in ledger.families().values())
    assert pools == runner.pool.nbytes() > 0
    if device.type == "cpu":
        assert ledger.residual is None and ledger.families()["decode"].driver_bytes == 0
    else:
        assert abs(ledger.residual or 0) <= 16 * MIB


def test_bytes_in_words() -> None:
    assert [in_units(n) for n in (0, 512, 3 << 10, -5 * MIB, 1288 << 20)] == [
        "0 bytes", "512 bytes", "3.0 KiB", "-5.0 MiB", "1.26 GiB",
    ]  # fmt: skip
