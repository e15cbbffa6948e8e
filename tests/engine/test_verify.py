"""The engine verifies its graphs: on batches that it might have, and it finds what a recording took for good."""

from __future__ import annotations

import pytest
import torch
from engine.tiny import CONFIG, request, run_all, tiny_engine

from stepgraph.engine.kv_blocks import BLOCK_SIZE
from stepgraph.engine.random_batches import RandomBatches
from stepgraph.ops.sampling import sample
from stepgraph.runtime import BatchDescriptor, ConfigError, ReplayError


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


def test_no_room_for_what_may_be_drawn_says_what_to_change() -> None:
    batches().require_room(16, 64)
    with pytest.raises(ConfigError, match="at least 20 blocks and a max_model_len of 64"):
        batches(num_blocks=19).require_room(16, 64)
    with pytest.raises(ConfigError, match="requests of up to 50 tokens"):
        batches(max_model_len=50).require_room(16, 64)


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
