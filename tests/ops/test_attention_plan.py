"""Into how many programs a decode is cut, from host constants alone."""

from dataclasses import replace

import pytest
import torch

from stepgraph.ops.attention import AttentionShape, get_backend
from stepgraph.ops.attention.cuda_decode import CudaDecode
from stepgraph.ops.attention.decode_plan import TRITON, DecodeConfig, SplitPlan
from stepgraph.ops.attention.select import planned_workspace
from stepgraph.runtime.errors import ConfigError

SHAPE = AttentionShape(32, 8, 128)
PLAN = SplitPlan(SHAPE, DecodeConfig(programs_per_sm=2, min_chunk=128), num_sms=132, max_rows=256, max_len=8192)


def test_a_single_row_fills_the_device_and_no_second_wave_is_begun() -> None:
    assert PLAN.splits(1) == 33
    for rows in range(1, 17):
        assert rows * 8 * PLAN.splits(rows) <= 264
    assert replace(PLAN, config=DecodeConfig(programs_per_sm=1)).splits(1) == 16


def test_many_rows_are_cut_for_the_sake_of_a_long_one_only() -> None:
    assert PLAN.splits(256) == 2
    assert replace(PLAN, max_len=4096).splits(256) == 1
    assert replace(PLAN, max_len=1 << 20).splits(256) == 4


def test_no_part_is_shorter_than_what_is_worth_a_program() -> None:
    assert replace(PLAN, max_len=1000).splits(1) == 8
    assert replace(PLAN, max_len=100).splits(1) == 1
    assert replace(PLAN, shape=replace(SHAPE, window=512)).splits(1) == 4


@pytest.mark.parametrize("max_len", [100, 8192, 131072])
@pytest.mark.parametrize("max_rows", [1, 13, 256])
def test_the_workspace_holds_every_batch(max_len: int, max_rows: int) -> None:
    plan = replace(PLAN, max_len=max_len, max_rows=max_rows)
    needed = [rows * plan.splits(rows) for rows in range(1, max_rows + 1) if plan.splits(rows) > 1]
    assert plan.capacity == max(needed, default=0)


def test_a_tile_is_of_one_size_in_bytes() -> None:
    config = DecodeConfig(tile_bytes=16 << 10)
    assert [config.tile(size) for size in (32, 128, 256, 512, 2048)] == [128, 128, 64, 32, 16]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_stages": 0}, "at least 1"),
        ({"min_chunk": 256, "max_chunk": 128}, "max_chunk at least min_chunk"),
        ({"tile_bytes": 12 << 10}, "powers of two"),
        ({"num_warps": 3}, "powers of two"),
    ],
)
def test_configurations_that_cannot_work_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecodeConfig(**values)  # type: ignore[arg-type]


def test_plans_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows and max_len must be at least 1"):
        replace(PLAN, max_rows=0)
    with pytest.raises(ConfigError, match="min_chunk 100 is not a multiple of the block size 16"):
        replace(PLAN, config=DecodeConfig(min_chunk=100))


@pytest.mark.parametrize(("rows", "max_len"), [(1, 64), (16, 4096), (512, 8192)])
def test_a_workspaces_bytes_are_known_before_it_is_there(rows: int, max_len: int) -> None:
    pytest.importorskip("triton")
    from stepgraph.ops.attention.triton_decode import DecodeWorkspace

    shape, cpu = AttentionShape(32, 8, 128, 16), torch.device("cpu")
    made = DecodeWorkspace.allocate(plan := SplitPlan(shape, TRITON, 132, rows, max_len), cpu)
    assert plan.workspace_bytes() == made.parts.nbytes + made.levels.nbytes + made.arrived.nbytes
    own = CudaDecode(shape, cpu, num_sms=132, max_rows=rows, max_len=max_len, overlap=False)
    expected = plan.workspace_bytes() + own.parts.nbytes + own.levels.nbytes + own.arrived.nbytes
    assert planned_workspace(shape, 132, rows, max_len) == expected


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_the_default_backend() -> None:
    shape, num_sms = AttentionShape(32, 8, 128, 16), torch.cuda.get_device_properties().multi_processor_count
    backend = get_backend(None, "cuda", shape, max_rows=64, max_len=4096)
    if backend.name == "cuda":
        assert planned_workspace(shape, num_sms, 64, 4096) == sum(one.nbytes for one in backend.tensors().values())
