"""Philox4x32-10 (Salmon et al., 2011): noise as a pure function of (seed, position, token).

No generator state means that a captured step needs no RNG launch, and that a request draws the same noise in any batch.
`triton_sample` computes the same bits.
"""

import torch

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds. Words are int64 tensors in [0, 2**32) that broadcast; so are the results."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products wrap into the sign bit; the shift and the mask then read the right 32 bits.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        # c1 and c3 keep their high halves until the next mask: a low word is only ever xor-ed.
        c0, c1 = ((b >> 32) ^ c1 ^ k0).bitwise_and_(_MASK), b
        c2, c3 = ((a >> 32) ^ c3 ^ k1).bitwise_and_(_MASK), a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniform(word: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1), both ends excluded, from a 32-bit word: (word + 1/2) / 2**32, fine-grained towards 0."""
    return word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel(u: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise. Small `u` are the large values, so that the tail has float32's resolution near 0."""
    return -torch.log(-torch.log1p(-u))


def uniform_at(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The uniforms of single tokens; int64 tensors of one shape."""
    words = philox4x32(_counter(position, token // 4), _key(seed))
    return uniform(torch.stack(words).gather(0, (token % 4)[None])[0])


def uniform_rows(seed: torch.Tensor, position: torch.Tensor, vocab: int, first: int = 0) -> torch.Tensor:
    """The uniforms of the `vocab` tokens from `first` on, [rows, vocab], for int64 seeds and positions [rows]."""
    blocks = torch.arange(first // 4, (first + vocab + 3) // 4, device=seed.device)
    words = philox4x32(_counter(position[:, None], blocks), _key(seed[:, None]))
    return uniform(torch.stack(words, dim=-1)).flatten(1)[:, first % 4 : first % 4 + vocab]


def _counter(position: torch.Tensor, block: torch.Tensor) -> Words:
    return block, position & _MASK, (position >> 32) & _MASK, torch.zeros_like(position)


def _key(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return seed & _MASK, (seed >> 32) & _MASK
