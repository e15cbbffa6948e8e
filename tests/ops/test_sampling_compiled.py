"""The samplers' kernels compile for a GPU: a name that changes its type passes the interpreter, and no compiler."""

from __future__ import annotations

import pytest
import torch
from ops.shard_cases import batch, penalties

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run where there is a GPU")

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "seen")


@pytest.mark.parametrize("penalised", [False, True])
def test_the_samplers_compile_for_hopper(penalised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ops.compiling import compiled_kernels

    from stepgraph.ops.sampling import triton_chain, triton_sample

    monkeypatch.setattr(triton_sample, "can_overlap", lambda device: True)
    given = batch(4, 101)
    logits, out = given.pop("logits"), torch.zeros(4, dtype=torch.int64)
    more = dict(zip(PENALTIES, penalties(4, 101), strict=True)) if penalised else {}
    assert compiled_kernels(lambda: triton_sample.sample_triton(logits, **given, out=out, **more)) == [
        "sample_first",
        "sample_histogram",
        "sample_sure",
        "sample_finish",
    ]
    names = compiled_kernels(lambda: triton_chain.chain_triton(logits, **given, out=out, **more))
    assert names == ["_penalties", "_temperature", "_top_k", "_top_p", "_softmax", "_draw", "_gather"]
