"""Who gets how much memory: rows that add up, a cache that takes what is left, and errors that name what to change."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.hf import write_checkpoint
from engine.tiny import CONFIG, tiny_engine, tiny_graphs
from runtime.fake_virtual import FakeVirtualMemory
from runtime.test_estimate import PROFILE

from stepgraph import LLM, SamplingParams
from stepgraph.engine.budget import MARGIN, Budget
from stepgraph.engine.kv_blocks import block_bytes
from stepgraph.engine.kv_plan import KVPlan, kv_plan
from stepgraph.engine.memory_rows import WEIGHTS, step_features
from stepgraph.runtime import GraphConfig, Ladder
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.memory.profile import DeviceProfile
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.base import DeviceMemory

MIB = 1 << 20
BLOCK = block_bytes(CONFIG, torch.float32)
FLOAT = torch.float32


class FakeDevice:
    """A device of 1 GiB, of which `others` and a virtual memory have some and torch holds some in its cache."""

    device, total = torch.device("cpu"), 1 << 30

    def __init__(self, others: int = 0) -> None:
        self.virtual = FakeVirtualMemory()
        self.others, self.cached = others, 0

    def memory(self) -> DeviceMemory:
        free = self.total - self.others - self.cached - self.virtual.used
        return DeviceMemory(self.total, free, reserved=self.cached, allocated=0)

    def give_back(self) -> None:
        self.cached = 0


def plan_for(device: FakeDevice, fraction: float = 0.9, **options: Any) -> KVPlan:
    sizes = {"max_num_seqs": 16, "rows": 16, "tokens": 80, "penalties": True, **options}
    return KVPlan(Budget(device, fraction), device.virtual, **sizes)


def leaving(nbytes: int) -> FakeDevice:
    """A device with `nbytes` spare of 0.9."""
    return FakeDevice(int(FakeDevice.total * 0.9) - MARGIN - nbytes)


def settled(plan: KVPlan, during: Callable[[], None] = lambda: None) -> tuple[Any, Any]:
    graphs = tiny_graphs("full")
    core = tiny_engine(num_blocks=plan.num_blocks(CONFIG, FLOAT, 256, graphs), memory=plan.virtual)
    rehearse = core.run_largest_step

    def run_largest_step() -> None:
        rehearse()
        during()

    core.run_largest_step = run_largest_step  # type: ignore[method-assign]
    return core, plan.settle(core)


def test_the_rows_add_up_to_all_the_device_has() -> None:
    device = FakeDevice(100 * MIB)
    budget = Budget(device, 0.8)
    device.others += 50 * MIB
    budget.take("weights")
    device.others += 7 * MIB
    device.cached += 9 * MIB
    budget.take("graphs")
    device.cached += 3 * MIB
    budget.take("eager steps", with_cached=True)
    table = budget.table()
    assert [row.nbytes // MIB for row in table.rows[:4]] == [100, 50, 7, 3]
    assert sum(row.nbytes for row in table.rows) == table.total == 1 << 30
    assert budget.spare == table["unused"] == budget.allowed - 160 * MIB - MARGIN
    assert table.as_dict()["rows"][1] == {"name": "weights", "bytes": 50 * MIB} and table["nobody"] == 0


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01])
def test_a_fraction_is_a_fraction(fraction: float) -> None:
    with pytest.raises(ConfigError, match="memory_fraction"):
        Budget(FakeDevice(), fraction)


def test_the_cache_takes_what_is_left_after_graphs_and_eager_steps() -> None:
    device = leaving(3 * MIB // 2)

    def eager_steps_allocate() -> None:
        device.cached += MIB // 2

    core, table = settled(plan_for(device), eager_steps_allocate)
    assert core.kv_memory.num_blocks == MIB // BLOCK and core.kv_memory.max_blocks == 16 * 16 + 1
    assert table["eager steps, at most"] == MIB // 2 and 0 <= table["unused"] < device.virtual.granularity
    assert sum(row.nbytes for row in table.rows) == table.total


def test_graphs_that_a_lazy_engine_still_captures_find_room() -> None:
    graphs = replace(tiny_graphs("full", Ladder.explicit([1, 2, 4, 8, 16])), lazy=True)
    device = leaving(100 * MIB)
    plan = plan_for(device)
    core = tiny_engine(graphs=graphs, num_blocks=plan.num_blocks(CONFIG, FLOAT, 256, graphs), memory=plan.virtual)
    table, pending = plan.settle(core), len(core.runner.pending)
    assert pending >= 4 and table["graphs still to come"] == pending * MIB
    assert table["step buffers, copied meanwhile"] == core.buffers.slab.nbytes
    assert sum(row.nbytes for row in table.rows) == table.total and plan.budget is not None
    assert plan.budget.spare == table["unused"]


def test_it_takes_no_more_than_a_full_batch_can_use() -> None:
    core, table = settled(plan_for(leaving(100 * MIB)))
    assert core.kv_memory.num_blocks == core.kv_memory.max_blocks == 16 * 16 + 1 and table["unused"] > 90 * MIB


@pytest.mark.parametrize("asked", [{"kv_blocks": 50}, {"kv_bytes": 50 * BLOCK + 1}])
def test_a_size_that_is_asked_for_is_what_there_is(asked: dict[str, int]) -> None:
    core, _ = settled(plan_for(leaving(100 * MIB), **asked))
    assert core.kv_memory.num_blocks == core.kv_memory.max_blocks == 50


def test_both_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        plan_for(FakeDevice(), kv_blocks=5, kv_bytes=5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"kv_blocks": 2.5}, "kv_blocks: 2.5 is not a whole number"),
        ({"kv_bytes": "x"}, "kv_bytes: 'x' is not"),
        ({"kv_blocks": True}, "kv_blocks: True"),
        ({"kv_blocks": 1}, "kv_blocks is 1; at least 2"),
        ({"kv_blocks": -3}, "kv_blocks is -3"),
        ({"kv_blocks": 10**30}, "no device has so much"),
        ({"kv_bytes": 10**26}, "no device has so much"),
    ],
)
def test_sizes_that_are_none(asked: dict[str, Any], says: str) -> None:
    sizes = {"max_num_seqs": 16, "rows": 16, "tokens": 80, "penalties": True, **asked}
    with pytest.raises(ConfigError, match=says):
        kv_plan(platform_for("cpu"), None, **sizes).require_fit(CONFIG, FLOAT, 256)


def test_less_than_two_blocks_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="kv_bytes is 100"):
        plan_for(FakeDevice(), kv_bytes=100).require_fit(CONFIG, FLOAT, 256)


def needed(plan: KVPlan) -> int:
    """What the tiny model needs at least, at a length of 256: weights, buffers, and the cache of one request."""
    return sum(plan._planned(CONFIG, FLOAT, 256, plan.rows).values()) + 17 * BLOCK


def test_what_fits_exactly_is_accepted_and_one_byte_less_is_not() -> None:
    enough = needed(plan_for(FakeDevice()))
    plan_for(leaving(enough)).require_fit(CONFIG, FLOAT, 256)
    with pytest.raises(ConfigError, match=r"raise memory_fraction to 0\.91; lower max_model_len to 240; lower max_num"):
        plan_for(leaving(enough - 1)).require_fit(CONFIG, FLOAT, 256)


def test_the_error_names_numbers_that_do() -> None:
    """Each of the three remedies is tried by itself."""
    wide = {"rows": 256, "max_num_seqs": 256, "tokens": 300}
    spare = needed(plan_for(FakeDevice(), **wide)) - 5 * BLOCK // 2
    with pytest.raises(ConfigError) as error:
        plan_for(leaving(spare), **wide).require_fit(CONFIG, FLOAT, 256)
    text = str(error.value)
    fraction, length, seqs = (
        float(re.search(rf"{name} to ([\d.]+)", text)[1])  # type: ignore[index]
        for name in ("memory_fraction", "max_model_len", "max_num_seqs")
    )
    fewer = {**wide, "rows": int(seqs), "max_num_seqs": int(seqs)}
    plan_for(leaving(spare), fraction, **wide).require_fit(CONFIG, FLOAT, 256)
    plan_for(leaving(spare), **wide).require_fit(CONFIG, FLOAT, int(length))
    plan_for(leaving(spare), **fewer).require_fit(CONFIG, FLOAT, 256)


def test_what_no_number_alone_can_mend_is_said_so() -> None:
    device = FakeDevice(FakeDevice.total)
    with pytest.raises(
        ConfigError, match="free memory of the device; lower kv_bytes, which alone .*max_num_seqs, which"
    ):
        plan_for(device, kv_bytes=10 * BLOCK).require_fit(CONFIG, FLOAT, 256)


def test_too_little_left_after_the_capture_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV cache .*lower kv_blocks to "):
        settled(plan_for(leaving(MIB), kv_blocks=200))


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_without_virtual_memory_the_cache_is_what_an_estimate_leaves(profile: DeviceProfile | None) -> None:
    sizes = {"max_num_seqs": 16, "rows": 16, "tokens": 80, "penalties": True, "profile": profile}
    graphs = tiny_graphs("full")
    estimate = KVPlan(None, None, **sizes).estimate(CONFIG, FLOAT, 256, graphs)  # type: ignore[arg-type]
    plan = KVPlan(Budget(leaving(estimate + MIB), 0.9), None, **sizes)  # type: ignore[arg-type]
    core, table = settled(plan)
    assert core.kv_memory.num_blocks == MIB // BLOCK and not core.kv_memory.resizable and table["KV cache"] == 0


def test_the_rule_counts_buffers_graphs_and_eager_steps() -> None:
    plan = plan_for(FakeDevice())
    graphs, none = tiny_graphs("full"), GraphConfig()
    eager = step_features(CONFIG, FLOAT, rows=16, tokens=80)
    step = int(eager["logits"] + eager["activations"])
    buffers = sum(plan._planned(CONFIG, FLOAT, 256, 16).values()) - plan._planned(CONFIG, FLOAT, 256, 16)[WEIGHTS]
    assert plan.estimate(CONFIG, FLOAT, 256, none) == buffers + step
    keys = capture_keys(graphs, max_requests=16, max_tokens=80)
    more = plan.estimate(CONFIG, FLOAT, 256, graphs) - buffers - step
    assert len(keys) * MIB < more <= len(keys) * MIB + step


def test_a_cpu_has_no_fraction_but_a_table() -> None:
    cpu = platform_for("cpu")
    sizes = {"max_num_seqs": 16, "rows": 16, "tokens": 80, "penalties": True}
    with pytest.raises(ConfigError, match="kv_bytes instead"):
        kv_plan(cpu, 0.5, **sizes)
    core, table = settled(kv_plan(cpu, None, kv_bytes=30 * BLOCK, **sizes))
    assert core.kv_memory.num_blocks == 30 and table["KV cache"] == 30 * BLOCK and table.total is None
    assert table["weights and rotary tables"] > 0 and table["static buffers"] > 0


def test_an_llm_on_a_device_sizes_its_cache_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts = write_checkpoint(tmp_path), [[1, 2, 3], list(range(40))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = LLM(folder, device="cpu", max_num_seqs=4).generate(prompts, params)
    device = leaving(MIB)

    def plan(_: object, fraction: float | None, **wanted: Any) -> KVPlan:
        return KVPlan(Budget(device, fraction or 0.9), device.virtual, **wanted)

    monkeypatch.setattr("stepgraph.engine.llm.kv_plan", plan)
    llm = LLM(folder, device="cpu", max_num_seqs=4)
    got = llm.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in expected]
    names = [row.name for row in llm.memory.rows]
    assert names[:3] == ["driver, torch, other processes", "weights", "attention workspaces"]
    assert names[3:7] == ["step buffers", "graphs", "eager steps, at most", "KV cache"]
    assert (
        device.virtual.used == llm.core.kv_memory.nbytes > 2 * llm.core.kv_memory.block_bytes
        and device.virtual.untouched()
    )


def test_an_llm_that_cannot_fit_loads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, device = write_checkpoint(tmp_path), leaving(1000)
    monkeypatch.setattr(
        "stepgraph.engine.llm.kv_plan",
        lambda _, __, **wanted: KVPlan(Budget(device, 0.9), device.virtual, **wanted),
    )
    loaded: list[str] = []
    with pytest.raises(ConfigError, match="memory_fraction"):
        LLM(folder, device="cpu", progress=lambda done, total, what: loaded.append(what))
    assert not loaded


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_cache_ends_where_the_fraction_does(tmp_path: Path) -> None:
    """The model's useful cache is far smaller than a GPU, so the size is asked for; the table must still add up."""
    llm = LLM(write_checkpoint(tmp_path), device="cuda", max_num_seqs=4, memory_fraction=0.8)
    assert llm.core.kv_memory.resizable and llm.core.kv_memory.num_blocks == llm.core.kv_memory.max_blocks
    assert sum(row.nbytes for row in llm.memory.rows) == llm.memory.total
    assert llm.memory["unused"] > 0 and llm.memory["KV cache"] >= 0
    with pytest.raises(ConfigError, match="raise memory_fraction to"):
        LLM(tmp_path, device="cuda", max_num_seqs=4, memory_fraction=0.001)
