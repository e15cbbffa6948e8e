"""Two GPUs give the tokens of one, and a rank that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from comm.ranks_in_processes import results, run_ranks
from engine.hf import write_checkpoint

from stepgraph.comm.communicator import make_all_reduce
from stepgraph.comm.group import Group
from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.parallel import TensorParallel
from stepgraph.runtime import Ladder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = ["The capital of France is", "Once upon a time", "1 2 3 4", "The colour of the sky"]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def like_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's heads, of which two ranks get unequal numbers, for machines that lack the demo model."""
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), num_hidden_layers=6, hidden_size=576, intermediate_size=1536,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=512,
    )  # fmt: skip


def make_llm(
    model: Path, device: str, graphs: str, parallel: TensorParallel | None = None, operations: str | None = None
) -> LLM:
    ladder = None if graphs == "disabled" else Ladder.explicit([1, 2, 4])
    return LLM(
        model, device=device, dtype="float32", graphs=graphs, ladder=ladder, max_num_seqs=4, max_model_len=512,
        kv_blocks=256, parallel=parallel, operations=operations,
    )  # fmt: skip


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def generated(group: Group, model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for graphs, operations in (("full", None), ("breakable", None), ("disabled", None), ("full", "fused")):
        parallel = TensorParallel(group, make_all_reduce(group))
        llm = make_llm(model, str(group.device), graphs, parallel, operations)
        found[operations or graphs] = (
            tokens(llm, GREEDY),
            tokens(llm, FILTERED),
            parallel.frozen(),
            llm.stats.as_dict()["modes"],
        )
    return found


@pytest.mark.parametrize("fixture", ["demo_model", "like_demo"])
def test_tokens_equal_those_of_one_gpu(request: pytest.FixtureRequest, tmp_path: Path, fixture: str) -> None:
    model: Path = request.getfixturevalue(fixture)
    alone = make_llm(model, "cuda", "full")
    sums = 2 * alone.config.num_layers
    greedy, filtered = tokens(alone, GREEDY), tokens(alone, FILTERED)
    del alone
    torch.cuda.empty_cache()
    for found in results(run_ranks(2, tmp_path, generated, model, device="cuda", limit=280)):
        for way, (ours, ours_filtered, frozen, modes) in found.items():
            assert ours == greedy, way
            assert ours_filtered == filtered, way
            if way in ("full", "fused"):
                assert "EAGER" not in modes
                decode = frozen["4 requests"]
                assert [one["kind"] for one in decode] == ["all_reduce"] * sums + ["gather"]
                assert {one["algorithm"] for one in decode[:-1]} == {"one_shot_push"}


def is_killed(group: Group, model: Path, folder: Path) -> None:
    llm = make_llm(model, str(group.device), "full", TensorParallel(group, make_all_reduce(group)))
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for number, _ in enumerate(llm.stream(PROMPTS[:1], long)):
        if number == 30 and group.rank == 1:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_killed_while_decoding_ends_the_other_within_15_seconds(like_demo: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, is_killed, like_demo, tmp_path, device="cuda")
    assert second.code == -signal.SIGKILL
    assert first.error is not None and "rank 1" in first.error
    written = [(tmp_path / name).stat().st_mtime for name in ("died", "rank0.pkl")]
    assert 0 <= written[1] - written[0] < 15
    assert float(torch.ones(8, device="cuda").sum()) == 8  # no hung GPU
