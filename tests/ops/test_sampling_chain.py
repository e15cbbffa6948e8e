"""The sampling chain chooses what the fused sampler chooses, in seven steps that can be captured and counted."""

import pytest
import torch
from ops.sampling_cases import sampling_case

from stepgraph.ops.sampling import get_sampler, sample, sample_chain
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms import platform_for

STEPS = ["penalties", "temperature", "top_k", "top_p", "softmax", "draw", "gather"]


@pytest.mark.parametrize("number", range(12))
def test_the_chain_chooses_the_fused_sampler_s_tokens(number: int) -> None:
    case = sampling_case(number, rows=24, vocab=[7, 301, 2048][number % 3])
    want, got = case.run(sample), case.run(sample_chain)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_chain_needs_no_penalties_and_no_min_p() -> None:
    case = sampling_case(1, rows=24, vocab=301)
    names = ("temperature", "top_k", "top_p", "seed", "position")
    tokens = []
    for sampler in (sample, sample_chain):
        out = torch.empty(24, dtype=torch.int64)
        sampler(case.logits, out=out, **{name: case.arguments[name] for name in names})
        tokens.append(out)
    assert torch.equal(*tokens)


def record(case, sampler=sample_chain):
    """A recording of a sampler, and its tokens and counts after a replay on fresh positions."""
    out, seen = torch.zeros(len(case.logits), dtype=torch.int64, device=case.logits.device), case.seen.clone()

    def step() -> None:
        sampler(case.logits, out=out, seen=seen, **case.arguments)

    platform = platform_for(case.logits.device)
    with torch.inference_mode():
        platform.warm_up(step)
        recording, _ = platform.record(step, platform.new_pool())
        seen.copy_(case.seen)
        case.arguments["position"].add_(1)
        recording.replay()
    platform.synchronize()
    return recording, out, seen


def test_a_tape_holds_the_chain_step_by_step() -> None:
    case = sampling_case(2, rows=8, vocab=301)
    recording, *replayed = record(case)
    assert list(dict.fromkeys(node.region for node in recording.nodes() if node.region)) == STEPS
    want = case.run(sample)
    assert torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1])


def test_samplers_by_name() -> None:
    assert get_sampler("fused") is sample and get_sampler("chain") is sample_chain
    with pytest.raises(ConfigError, match="unknown name 'magic'; use fused or chain"):
        get_sampler("magic")


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "vocab"), [(10, 1000), (11, 32000), (13, 128256)])
def test_the_triton_chain_chooses_the_same(device: torch.device, number: int, vocab: int) -> None:
    case = sampling_case(number, rows=24, vocab=vocab, dtype=torch.bfloat16)
    want, got = case.run(sample), case.to(device).run(sample_chain)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.gpu
def test_the_triton_chain_is_seven_launches(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.driver")
    case = sampling_case(2, rows=8, vocab=32000).to(device)
    recording, *replayed = record(case)
    assert [(node.type, node.region) for node in recording.nodes()] == [("kernel", step) for step in STEPS]
    want = case.run(sample)
    assert torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1])


@pytest.mark.gpu
def test_the_fused_sampler_is_four_launches_whatever_is_asked(device: torch.device) -> None:
    pytest.importorskip("cuda.bindings.driver")
    case = sampling_case(2, rows=8, vocab=32000).to(device)
    recording, *replayed = record(case, sample)
    assert [node.type for node in recording.nodes()] == ["kernel"] * 4
    want = case.run(sample_chain)
    assert torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1])
