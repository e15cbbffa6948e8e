"""The noise: Philox4x32-10 to the bit, uniforms inside (0, 1), one function of seed, position and token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.ops.sampling.philox import gumbel, philox4x32, uniform, uniform_at, uniform_rows

# tests/kat_vectors of Random123, the authors' own implementation: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
INT64 = st.integers(-(2**63), 2**63 - 1)


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    c, k = words(counter), words(key)
    assert philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1])) == tuple(words(result))


def test_known_answers_together_as_they_broadcast() -> None:
    columns = [torch.cat([words(row[part])[i] for row in KNOWN]) for part, i in [(0, j) for j in range(4)]]
    keys = [torch.cat([words(row[1])[i] for row in KNOWN]) for i in range(2)]
    got = philox4x32((columns[0], columns[1], columns[2], columns[3]), (keys[0], keys[1]))
    assert [[f"{int(w):08x}" for w in row] for row in zip(*got, strict=True)] == [row[2].split() for row in KNOWN]


def plain_philox(seed: int, position: int, token: int) -> int:
    """The definition in Python integers: key = seed, counter = (token // 4, position, 0), word token % 4."""
    mask = 2**32 - 1
    c = [token // 4, position & mask, position >> 32 & mask, 0]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & mask, a >> 32 ^ c[3] ^ k[1], a & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return c[token % 4]


@given(INT64, INT64, st.integers(0, 200_000))
@settings(max_examples=60, deadline=None)
def test_uniforms_are_philox_words_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    got = uniform_at(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    word = plain_philox(seed, position, token)
    assert got.dtype == torch.float32
    assert got.item() == uniform(torch.tensor([word])).item()
    assert got.item() == pytest.approx((word + 0.5) / 2**32, rel=2**-23)


@pytest.mark.parametrize("vocab", [1, 3, 4, 4099])
def test_whole_rows_are_the_single_tokens(vocab: int) -> None:
    seed, position = torch.tensor([3, -7, 2**62]), torch.tensor([0, 5, 2**33 + 1])
    rows = uniform_rows(seed, position, vocab)
    tokens = torch.arange(vocab)
    for row in range(3):
        alone = uniform_at(seed[row].expand(vocab), position[row].expand(vocab), tokens)
        assert torch.equal(rows[row], alone)


def test_uniforms_stay_inside_0_and_1_and_their_noise_is_finite() -> None:
    u = uniform(torch.tensor([0, 1, 2**31, 2**32 - 129, 2**32 - 1]))
    assert (u > 0).all() and (u < 1).all()
    assert u[0] == 2**-33  # the tail keeps its resolution: no token likelier than 1e-9 is out of reach
    noise = gumbel(u)
    assert noise.isfinite().all()
    assert (noise.diff() <= 0).all()


def test_uniforms_are_uniform_and_unrelated_between_neighbours() -> None:
    u = uniform_rows(torch.arange(8), torch.zeros(8, dtype=torch.int64), 16384).double()
    assert u.mean().item() == pytest.approx(0.5, abs=0.005)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.002)
    correlation = torch.corrcoef(torch.stack([*u, *(row.roll(1) for row in u[:2])]))
    assert (correlation - torch.eye(10)).abs().max() < 0.05
