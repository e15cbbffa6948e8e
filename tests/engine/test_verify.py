"""The engine verifies its graphs: on batches that it might have, and it finds what a recording took for good."""

from __future__ import annotations

import pytest
import torch
from engine.tiny import CONFIG, request, run_all, tiny_engine
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.engine.kv_blocks import BLOCK_SIZE
from stepgraph.engine.random_batches import RandomBatches
from stepgraph.ops.sampling import sample
from stepgraph.runtime import BatchDescriptor, ReplayError


def batches(**changes) -> RandomBatches:
    sizes = {"vocab_size": 97, "max_model_len": 256, "num_blocks": 40, "max_blocks": 16}
    return RandomBatches(**{**sizes, "penalties": True, "device": torch.device("cpu"), **changes})


@pytest.mark.parametrize(
    "batch",
    [
        BatchDescriptor.decode(1),
        BatchDescriptor.decode(16),
        BatchDescriptor.mixed(1, 1),
        BatchDescriptor.mixed(64, 1),
        BatchDescriptor.mixed(64, 16),
        BatchDescriptor.mixed(16, 16),
    ],
)
def test_random_batches_are_such_as_the_engine_might_have(batch: BatchDescriptor) -> None:
    for seed in range(50):
        inputs = batches()(batch, torch.Generator().manual_seed(seed))
        query_lens, seq_lens, tables = inputs["query_lens"], inputs["seq_lens"], inputs["block_tables"]
        assert len(query_lens) == batch.num_reqs and query_lens.sum() == batch.num_tokens and query_lens.min() >= 1
        assert len(inputs["prompt_tokens"]) == batch.num_tokens
        assert (seq_lens >= query_lens).all() and seq_lens.max() <= 256
        assert torch.equal(inputs["positions"], seq_lens.long() - 1)
        held = tables[tables > 0]
        assert len(held.unique()) == len(held) and held.max() <= 40
        assert torch.equal((tables > 0).sum(1), (seq_lens.long() + BLOCK_SIZE - 1) // BLOCK_SIZE)
        prompt = inputs["prompt_tokens"]
        assert prompt.min() >= -1 and prompt.max() < 97
        if batch.is_uniform:
            assert (prompt == -1).all()
        else:  # only a row with one token decodes
            assert int((prompt == -1).sum()) <= int((query_lens == 1).sum())


@given(data=st.data())
def test_batches_that_the_engine_cannot_have_give_way_to_the_nearest(data: st.DataObject) -> None:
    longest, blocks = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 40))
    asked = BatchDescriptor.mixed(tokens := data.draw(st.integers(1, 300)), data.draw(st.integers(1, min(tokens, 16))))
    slots = data.draw(st.integers(asked.num_reqs, 16))
    small = batches(max_model_len=longest, num_blocks=blocks, max_blocks=7)
    batch = small.nearest(asked, slots)
    assert batch.num_reqs <= min(slots, blocks) and batch.num_tokens <= asked.num_tokens
    inputs = small(batch, torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    query_lens, tables = inputs["query_lens"], inputs["block_tables"]
    assert len(query_lens) == batch.num_reqs and query_lens.sum() == batch.num_tokens
    assert 1 <= query_lens.min() <= query_lens.max() <= inputs["seq_lens"].max() <= longest
    held = tables[tables > 0]
    assert len(held.unique()) == len(held) and held.max() <= blocks
    assert torch.equal((tables > 0).sum(1), (inputs["seq_lens"].long() + BLOCK_SIZE - 1) // BLOCK_SIZE)


def test_the_nearest_is_the_batch_itself_where_there_is_room() -> None:
    small = batches(max_model_len=128, num_blocks=96)
    assert small.nearest(BatchDescriptor.mixed(512, 7, 2), 16) == BatchDescriptor.mixed(512, 7, 2)
    assert small.nearest(BatchDescriptor.mixed(512, 1), 16) == BatchDescriptor.mixed(512, 4)
    assert small.nearest(BatchDescriptor.mixed(512, 1), 3) == BatchDescriptor.mixed(384, 3)
    assert batches(num_blocks=5).nearest(BatchDescriptor.decode(8, num_loras=1), 8) == BatchDescriptor.decode(5, 1, 1)


@pytest.mark.parametrize("sizes", [{"max_model_len": 20}, {"num_blocks": 4}, {"num_blocks": 2, "max_model_len": 1}])
def test_an_engine_whose_steps_hold_more_than_a_request_or_the_cache(device, sizes: dict[str, int]) -> None:
    core = tiny_engine(device, max_num_seqs=4, chunk_tokens=64, **sizes)
    report = core.verify()
    assert report.ok, str(report)
    assert {one.batches for one in report.keys} == {3}


@pytest.mark.parametrize("graphs", ["full", "breakable"])
def test_replays_are_as_eager_and_the_engine_goes_on(device, graphs: str) -> None:
    core = tiny_engine(device, graphs=graphs)
    before = run_all(core, [request(0, [1, 2, 3])])
    core.scheduler.add(request(1, [4, 5]))
    with pytest.raises(ReplayError, match="requests are under way"):
        core.verify()
    core.scheduler.remove(core.scheduler.waiting[0])
    report = core.verify()
    assert report.ok, str(report)
    assert [one.key.num_reqs for one in report.keys if one.key.is_uniform] == [16, 8, 4, 2, 1]
    assert any(one.key.is_relaxed for one in report.keys)
    assert run_all(core, [request(2, [1, 2, 3])]) == before


def test_a_number_that_the_recording_took_for_good_is_found(device) -> None:
    offset = [0]

    def sampler(*tensors, out, **optional) -> None:
        sample(*tensors, out=out, **optional)
        out.add_(offset[0]).remainder_(CONFIG.vocab_size)

    core = tiny_engine(device, sampler=sampler)
    assert core.verify().ok
    offset[0] = 1
    report = core.verify()
    assert not report.ok and {key.ok for key in report.keys} == {False}
    assert "output tokens" in str(report)
    assert ("test_verify.py" if device.type == "cpu" else "has moved or changed since the capture") in str(report)
