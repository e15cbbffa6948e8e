"""What `sample` promises, on the torch reference everywhere and on the Triton kernel where there is a GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.captured import capture

from stepgraph.ops.sampling import sample
from stepgraph.ops.sampling.reference import _kept
from stepgraph.runtime.platforms.tape import TapePlatform

INF = float("inf")


def draw(
    logits: torch.Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    *,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample`, with one setting for all rows or one a row. Seeds count up and positions are 0 by default."""
    rows, device = logits.shape[0], logits.device
    out = torch.full((rows,), -1, device=device)

    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=device).expand(rows).contiguous()

    sample(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        torch.arange(rows, device=device) if seed is None else seed,
        torch.zeros(rows, dtype=torch.int64, device=device) if position is None else position,
        out,
    )
    return out


def noise_like(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# --- greedy


@pytest.mark.parametrize("vocab", [1, 7, 1021, 4096, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_argmax_and_the_lowest_of_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = noise_like(6, vocab).to(dtype)
    assert torch.equal(draw(logits, 0.0), logits.argmax(-1))
    tied = logits.round().clamp(max=2)
    first = (tied == tied.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
    assert torch.equal(draw(tied, 0.0), first)


def test_greedy_rows_ignore_every_other_setting() -> None:
    logits = noise_like(3, 512)
    assert torch.equal(draw(logits, [0.0, -1.0, math.nan], 2, 0.5), logits.argmax(-1))


# --- what is kept


def kept_by_definition(x: list[float], top_k: int, top_p: float) -> set[int]:
    """In float64, by sorting everything."""
    tokens = set(range(len(x)))
    if 0 < top_k < len(x):
        tokens = {i for i in tokens if x[i] >= sorted(x, reverse=True)[top_k - 1]}
    if top_p >= 1:
        return tokens
    top = max(x)
    total = math.fsum(math.exp(x[i] - top) for i in tokens)
    mass = 0.0
    for last in sorted(tokens, key=lambda i: -x[i]):  # noqa: B007
        mass += math.exp(x[last] - top)
        if mass >= top_p * total:
            break
    return {i for i in tokens if x[i] >= x[last]}


@given(
    st.lists(st.integers(-30, 30), min_size=1, max_size=40),
    st.integers(-1, 45),
    st.sampled_from([-0.5, 0.0, 0.1, 0.313, 0.5, 0.77, 0.9, 0.95, 0.999, 1.0, 1.5]),
    st.sampled_from([0.25, 0.7, 3.0]),
)
@settings(max_examples=300, deadline=None)
def test_top_k_and_top_p_keep_what_they_say(values: list[int], top_k: int, top_p: float, width: float) -> None:
    """Integer steps make ties; equal masses at the very edge of top_p are left out, where rounding decides."""
    x = torch.tensor(values, dtype=torch.float32) * width
    tokens, held = _kept(x, top_k, top_p)
    assert torch.equal(held, x[tokens]) and torch.equal(tokens, tokens.unique())
    near = [kept_by_definition(x.tolist(), top_k, top_p + shift) for shift in (-1e-6, 0.0, 1e-6)]
    if near[0] == near[2]:
        assert set(tokens.tolist()) == near[1]


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 50, 1000])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_large_vocabulary_keeps_what_sorting_keeps(top_p: float, top_k: int, temperature: float) -> None:
    x = noise_like(1, 32000)[0] / temperature
    tokens, _ = _kept(x, top_k, top_p)
    order = x.double().sort(descending=True)
    values = order.values[:top_k] if top_k else order.values
    size = int((values.softmax(0).cumsum(0) < top_p).sum()) + 1
    assert abs(len(tokens) - size) <= 1
    assert set(tokens.tolist()) == set(order.indices[: len(tokens)].tolist())


def test_only_kept_tokens_are_drawn_and_all_of_them() -> None:
    logits = torch.tensor([0.0, 3.0, 2.5, 2.5, -4.0, 2.0]).expand(400, 6)
    assert set(draw(logits, 1.0, top_k=2).tolist()) == {1, 2, 3}  # 2 and 3 are equal, so both stay
    assert set(draw(logits, 1.0, top_p=0.3).tolist()) == {1}
    assert set(draw(logits, 1.0, top_p=0.0).tolist()) == {1}
    assert set(draw(logits, 1.0, top_k=4, top_p=0.99).tolist()) == {1, 2, 3, 5}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_frequencies_are_the_softmax(top_p: float) -> None:
    rows = 6000
    logits = noise_like(1, 12)[0] / 2
    tokens = draw(logits.expand(rows, 12), 0.8, top_p=top_p, position=torch.arange(rows))
    probability = (logits.double() / 0.8).softmax(0)
    kept = sorted(kept_by_definition((logits / 0.8).tolist(), 0, top_p))
    probability = probability[kept] / probability[kept].sum()
    count = tokens.bincount(minlength=12).double()
    assert count.sum() == count[kept].sum()
    chi_square = ((count[kept] - rows * probability) ** 2 / (rows * probability)).sum().item()
    assert chi_square < 40  # 99.99 % of fair draws with 11 degrees of freedom stay below 38


# --- seeds


def test_seed_and_position_alone_decide_the_noise() -> None:
    logits, k, p = noise_like(8, 1000), [0, 5, 0, 20] * 2, [1.0, 1.0, 0.9, 0.8] * 2
    t = [0.0, 0.7, 1.0, 1.3, 0.9, 1.0, 0.0, 1.0]
    seed, position = torch.arange(8) * 977 - 3, torch.arange(8) + 2**33
    together = draw(logits, t, k, p, seed=seed, position=position)
    assert torch.equal(together, draw(logits, t, k, p, seed=seed, position=position))
    for row in range(8):
        one = slice(row, row + 1)
        alone = draw(logits[one], t[one], k[one], p[one], seed=seed[one], position=position[one])
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_another_seed_or_position_draws_afresh(changed: str) -> None:
    logits = torch.zeros(200, 1000)
    fixed = torch.full((200,), 5)
    counted = {"seed": fixed, "position": fixed} | {changed: torch.arange(200)}
    assert len(draw(logits, **counted).unique()) > 150


def test_no_torch_generator_is_used() -> None:
    state = torch.get_rng_state()
    draw(noise_like(4, 100), [0.0, 1.0, 1.0, 1.0], [0, 0, 5, 0], [1.0, 1.0, 1.0, 0.9])
    assert torch.equal(state, torch.get_rng_state())


# --- rows that make no sense


@pytest.mark.parametrize("vocab", [5, 4096, 5000])
@pytest.mark.parametrize("settings_", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.9), (0.5, 4, 0.5)])
def test_nan_and_infinite_logits_give_a_token_that_makes_sense(
    device: torch.device, vocab: int, settings_: tuple[float, int, float]
) -> None:
    check_odd_rows(device, vocab, settings_)


@pytest.mark.gpu
@pytest.mark.parametrize("settings_", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.9), (0.5, 4, 0.5)])
def test_triton_survives_the_same_odd_rows(device: torch.device, settings_: tuple[float, int, float]) -> None:
    check_odd_rows(device, 5000, settings_)


def check_odd_rows(device: torch.device, vocab: int, setting: tuple[float, int, float]) -> None:
    logits = torch.full((6, vocab), -1.0)
    logits[0] = math.nan
    logits[1] = -INF
    logits[2] = math.nan
    logits[2, 3] = 0.0  # the one number of its row
    logits[3, [2, 4]] = INF
    logits[4] = -INF
    logits[4, 4] = -1e30
    logits[5, 1] = math.nan
    logits[5, 0] = 90.0
    tokens = draw(logits.to(device), *setting).tolist()
    assert tokens == [0, 0, 3, 2, 4, 0]


# --- the operator


def test_the_operator_is_declared_as_it_behaves() -> None:
    rows = torch.ones(3)
    ints = torch.zeros(3, dtype=torch.int32)
    longs = torch.zeros(3, dtype=torch.int64)
    args = (noise_like(3, 20), rows, ints, rows, longs, longs, torch.zeros(3, dtype=torch.int64))
    torch.library.opcheck(torch.ops.stepgraph.sample.default, args, test_utils=("test_schema", "test_faketensor"))


def test_a_tape_holds_sampling_as_one_record_and_draws_afresh_at_each_replay() -> None:
    logits = torch.zeros(4, 1000)
    temperature, top_p = torch.tensor([1.0, 1.0, 0.5, 0.0]), torch.ones(4)
    top_k, seed = torch.zeros(4, dtype=torch.int32), torch.arange(4)
    position, out = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)

    def step() -> None:
        position.add_(1)
        sample(logits, temperature, top_k, top_p, seed, position, out)

    with torch.inference_mode():
        tape, _ = TapePlatform().record(step, None)
    assert tape.num_nodes == 2
    seen = []
    for _ in range(3):
        tape.replay()
        seen.append(out.tolist())
        assert seen[-1] == draw(logits, temperature.tolist(), position=position).tolist()
    assert len({tuple(tokens[:3]) for tokens in seen}) == 3
    assert [tokens[3] for tokens in seen] == [0, 0, 0]


# --- on a GPU


def mixed_batch(rows: int) -> tuple[list[float], list[int], list[float]]:
    """Every combination of greedy, plain, top-k and top-p."""
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 1.0), (1.0, 0, 0.95), (1.2, 200, 0.9), (0.3, 1, 0.5)]
    t, k, p = zip(*(kinds[row % len(kinds)] for row in range(rows)), strict=True)
    return list(t), list(k), list(p)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_draws_the_reference_s_tokens(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    """The noise is the same to the bit; its logarithms and a top_p mass may round apart, which moves no draw here."""
    logits = noise_like(48, vocab).to(dtype)
    seed, position = torch.arange(48) * 7919 - 11, torch.arange(48) + 2**32 - 20
    want = draw(logits, *mixed_batch(48), seed=seed, position=position)
    got = draw(logits.to(device), *mixed_batch(48), seed=seed.to(device), position=position.to(device))
    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_a_captured_sampler_follows_its_buffers(device: torch.device) -> None:
    rows, vocab = 16, 49152
    t, k, p = mixed_batch(rows)
    logits = noise_like(rows, vocab).to(device)
    temperature, top_p = torch.tensor(t, device=device), torch.tensor(p, device=device)
    top_k = torch.tensor(k, dtype=torch.int32, device=device)
    seed, position = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    out = torch.zeros(rows, dtype=torch.int64, device=device)

    def step() -> None:
        position.add_(1)
        sample(logits, temperature, top_k, top_p, seed, position, out)

    graph = capture(step)
    for turn in range(3):
        logits.copy_(noise_like(rows, vocab, seed=turn + 1))
        temperature.copy_(temperature.roll(1))
        top_k.copy_(top_k.roll(1))
        top_p.copy_(top_p.roll(1))
        graph.replay()
        settings_ = (temperature.tolist(), top_k.tolist(), top_p.tolist())
        want = draw(logits.cpu(), *settings_, seed=seed.cpu(), position=position.cpu())
        assert torch.equal(out.cpu(), want)
