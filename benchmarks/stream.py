"""How fast this card can be read from: the limit that a decode step is held against, measured beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from common import device_ms, quantiles

SIZE = 4 << 30  # bytes: far more than any cache holds
_PER_PROGRAM = 1 << 16  # elements
_CHOICES = [(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8)]


@triton.jit
def _sum(x, out, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    total = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, PER_PROGRAM, BLOCK):
        total += tl.load(x + start + offset + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_limit(rounds: int = 20) -> dict[str, float]:
    """Bytes per second of a sum over 4 GiB, the best of a few tilings: median, p10 and p90."""
    x = torch.ones(SIZE // 4, device="cuda")
    programs = x.numel() // _PER_PROGRAM
    out = torch.empty(programs, device="cuda")
    best: dict[str, float] = {"median": 0.0}
    for block, warps in _CHOICES:

        def read(block: int = block, warps: int = warps) -> None:
            _sum[(programs,)](x, out, PER_PROGRAM=_PER_PROGRAM, BLOCK=block, num_warps=warps)

        read()
        assert out.sum().item() == x.numel()
        speeds = quantiles([SIZE / (ms / 1e3) for ms in device_ms(read, rounds)])
        best = max(best, speeds, key=lambda q: q["median"])
    return best
