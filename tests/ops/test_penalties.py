"""Penalties and min-p mean what vLLM and transformers mean by them, and the row's counts follow its tokens."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.sampling_cases import SamplingCase, sampling_case

from stepgraph.ops.sampling import mark_seen, sample
from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.reference import _kept, sample_reference
from stepgraph.runtime.errors import ConfigError

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def marked(prompt: list[int], output: list[int], vocab: int = VOCAB) -> torch.Tensor:
    seen = torch.full((1, vocab), 77, dtype=torch.int32)
    mark_seen(seen[0], *(torch.tensor(tokens, dtype=torch.int64) for tokens in (prompt, output)))
    return seen


def penalised_by_definition(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """In Python's floats, token by token."""
    counts = Counter(output)
    result = []
    for token, logit in enumerate(logits):
        if token in counts or token in prompt:
            logit = logit / repetition if logit > 0 else logit * repetition
        result.append(logit - frequency * counts[token] - presence * (counts[token] > 0))
    return result


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB),
    TOKENS,
    TOKENS,
    st.sampled_from([1.0, 0.5, 1.25, 3.0]),
    st.sampled_from([0.0, 2.0, -0.75]),
    st.sampled_from([0.0, 0.5, -2.0]),
)
@settings(max_examples=200, deadline=None)
def test_penalties_by_their_definition(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    penalties = Penalties(row(repetition), row(presence), row(frequency), marked(prompt, output))
    got = penalties.apply(row(*logits)[None])[0]
    want = penalised_by_definition(logits, prompt, output, repetition, presence, frequency)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-5)


@given(TOKENS, TOKENS, TOKENS)
@settings(max_examples=100, deadline=None)
def test_counting_step_by_step_is_marking_afresh(prompt: list[int], before: list[int], after: list[int]) -> None:
    """A row that was counted on by the step and one that the host restores hold the same."""
    seen = marked(prompt, before)
    for token in after:
        Penalties(row(1.5), row(0.0), row(0.0), seen).note(torch.tensor([token]))
    assert torch.equal(seen, marked(prompt, before + after))
    counts = Counter(before + after)
    assert seen[0].tolist() == [2 * counts[token] + (token in prompt) for token in range(VOCAB)]


def test_repetition_is_transformers_processor() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 200, generator=generator) * 5
    ids = torch.randint(0, 200, (4, 60), generator=generator)
    for penalty in (0.7, 1.0, 1.3, 2.5):
        want = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
        seen = torch.cat([marked(one[:40].tolist(), one[40:].tolist(), 200) for one in ids])
        got = Penalties(row(*[penalty] * 4), torch.zeros(4), torch.zeros(4), seen).apply(logits)
        assert torch.equal(got, want)


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_transformers_warper(min_p: float) -> None:
    from transformers import MinPLogitsWarper

    for seed in range(10):
        x = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 3
        want = MinPLogitsWarper(min_p)(None, x[None].clone())[0].isfinite().nonzero()[:, 0]
        tokens, values = _kept(x, 0, 1.0, min_p)
        assert torch.equal(tokens, want) and torch.equal(values, x[want])


@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.05, 20, 0.9), (0.3, 50, 0.5), (0.01, 5, 0.99), (0.2, 0, 0.7)])
def test_the_filters_follow_each_other_in_vllms_order(min_p: float, top_k: int, top_p: float) -> None:
    """min-p before top-k before top-p: each renormalises what the one before it left."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(10):
        x = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 2
        want = MinPLogitsWarper(min_p)(None, x[None].double())
        if top_k:
            want = TopKLogitsWarper(top_k)(None, want)
        want = TopPLogitsWarper(top_p)(None, want)[0].isfinite().nonzero()[:, 0]
        assert torch.equal(_kept(x, top_k, top_p, min_p)[0], want)


def kept_by_definition(x: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """In Python's floats, by sorting everything; equals of the last one stay."""
    top = max(x)
    order = sorted((i for i in range(len(x)) if math.exp(x[i] - top) >= min_p), key=lambda i: -x[i])
    if 0 < top_k < len(order):
        order = [i for i in order if x[i] >= x[order[top_k - 1]]]
    if top_p >= 1:
        return set(order)
    total = math.fsum(math.exp(x[i] - top) for i in order)
    mass, size = 0.0, 0
    while size == 0 or mass < top_p * total:
        mass += math.exp(x[order[size]] - top)
        size += 1
    return {i for i in order if x[i] >= x[order[size - 1]]}


@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    st.integers(-1, 45),
    st.sampled_from([0.1, 0.313, 0.77, 0.95, 1.0]),
    st.sampled_from([0.0, 0.017, 0.09, 0.33, 0.83]),
)
@settings(max_examples=200, deadline=None)
def test_what_the_three_filters_keep(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    x = [value * 0.37 for value in values]
    near = [kept_by_definition(x, top_k, top_p + shift, min_p) for shift in (-1e-6, 0.0, 1e-6)]
    if near[0] == near[2]:  # equal masses at the very edge of top_p are left out: rounding decides there
        assert set(_kept(torch.tensor(x), top_k, top_p, min_p)[0].tolist()) == near[1]


# --- in the sampler


def greedy_by_definition(case: SamplingCase, row: int) -> int:
    seen, settings_ = case.seen[row].tolist(), {name: column[row].item() for name, column in case.arguments.items()}
    prompt = [token for token, mark in enumerate(seen) if mark % 2]
    output = [token for token, mark in enumerate(seen) for _ in range(mark // 2)]
    logits = penalised_by_definition(
        case.logits[row].tolist(),
        prompt,
        output,
        settings_["repetition_penalty"],
        settings_["presence_penalty"],
        settings_["frequency_penalty"],
    )
    return max(range(len(logits)), key=lambda token: logits[token])


def test_greedy_rows_are_penalised_too() -> None:
    case = sampling_case(1, rows=40, vocab=97)
    case.arguments["temperature"].zero_()
    tokens, _ = case.run(sample)
    assert tokens.tolist() == [greedy_by_definition(case, row) for row in range(40)]
    assert (tokens != case.logits.argmax(-1)).sum() > 5


@pytest.mark.parametrize("number", range(6))
def test_every_row_stands_for_itself(number: int) -> None:
    case = sampling_case(number, rows=24, vocab=301)
    tokens, seen = case.run(sample)
    for index in range(24):
        alone = case.row(index).run(sample)
        assert alone[0].item() == tokens[index].item() and torch.equal(alone[1][0], seen[index])


def test_the_token_chosen_is_counted_in_rows_that_ask() -> None:
    case = sampling_case(2, rows=40, vocab=97)
    tokens, seen = case.run(sample)
    columns = [case.arguments[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")]
    asked = Penalties(*columns, case.seen).asked()
    expected = case.seen.clone()
    for index in asked.nonzero()[:, 0].tolist():
        expected[index, tokens[index]] += 2
    assert torch.equal(seen, expected) and 0 < asked.sum() < 40


def test_rows_without_a_penalty_do_not_read_what_they_saw() -> None:
    case = sampling_case(3, rows=20, vocab=97)
    for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        case.arguments[name].fill_(off)
    case.seen.fill_(-(2**31))
    tokens, seen = case.run(sample)
    assert torch.equal(seen, case.seen)
    out = torch.empty(20, dtype=torch.int64)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    sample_reference(case.logits, out=out, **{name: case.arguments[name] for name in names})
    assert torch.equal(out, tokens)


def test_some_penalties_without_the_others_are_refused() -> None:
    case = sampling_case(0, rows=2, vocab=8)
    del case.arguments["presence_penalty"]
    with pytest.raises(ConfigError, match="together; missing: presence_penalty"):
        case.run(sample)


def test_the_operator_is_declared_as_it_behaves() -> None:
    case = sampling_case(4, rows=6, vocab=20)
    arguments = {name: case.arguments[name] for name in ("temperature", "top_k", "top_p", "seed", "position")}
    optional = {name: value for name, value in case.arguments.items() if name not in arguments}
    args = (case.logits, *arguments.values(), torch.zeros(6, dtype=torch.int64))
    torch.library.opcheck(
        torch.ops.stepgraph.sample.default,
        args,
        {**optional, "seen": case.seen},
        test_utils=("test_schema", "test_faketensor"),
    )


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "vocab"), [(10, 1000), (11, 32000), (12, 49152), (13, 128256), (14, 151936)])
def test_triton_draws_the_reference_s_tokens(device: torch.device, number: int, vocab: int, dtype: torch.dtype) -> None:
    case = sampling_case(number, rows=32, vocab=vocab, dtype=dtype)
    want, seen = case.run(sample)
    got = case.to(device).run(sample)
    assert torch.equal(got[0].cpu(), want) and torch.equal(got[1].cpu(), seen)


@pytest.mark.gpu
def test_triton_settles_rows_that_its_list_is_too_short_for(device: torch.device) -> None:
    from stepgraph.ops.sampling.triton_sample import SamplePlan

    for number in range(20, 26):
        case = sampling_case(number, rows=32, vocab=20000)
        want = case.run(sample)
        for plan in (SamplePlan(room=4), SamplePlan(block=512, bins=64), SamplePlan(programs=1)):
            got = case.to(device).triton(plan)
            assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.gpu
def test_triton_rows_stand_for_themselves_and_repeat(device: torch.device) -> None:
    case = sampling_case(30, rows=96, vocab=128256, dtype=torch.bfloat16).to(device)
    tokens, seen = case.run(sample)
    for _ in range(5):
        again = case.run(sample)
        assert torch.equal(again[0], tokens) and torch.equal(again[1], seen)
    for index in range(0, 96, 5):
        alone = case.row(index).run(sample)
        assert alone[0].item() == tokens[index].item() and torch.equal(alone[1][0], seen[index])
