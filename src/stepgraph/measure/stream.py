"""How fast this card can be read from: the limit that a decode step is held against, measured beside it."""

from __future__ import annotations

import torch

from stepgraph.measure.clock import device_ms
from stepgraph.measure.stats import quantiles
from stepgraph.runtime.errors import ConfigError

SIZE = 4 << 30  # bytes: far more than any cache holds
_PER_PROGRAM = 1 << 16  # elements
_CHOICES = [(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8)]

DEFINITION = "Bytes over seconds of a sum over 4 GiB that only reads, the best of a few tilings."


def read_limit(rounds: int = 20) -> dict[str, float]:
    """Bytes per second of a sum over 4 GiB, the best of a few tilings: median, p10 and p90.

    Raises:
        ConfigError: there is no CUDA device or no Triton.
    """
    if not torch.cuda.is_available():
        raise ConfigError("the read limit is measured on a CUDA device; there is none")
    try:
        from stepgraph.measure.kernels import sum_tiles
    except ImportError:
        raise ConfigError("the read limit is measured with Triton; pip install triton") from None
    x = torch.ones(SIZE // 4, device="cuda")
    programs = x.numel() // _PER_PROGRAM
    out = torch.empty(programs, device="cuda")
    best: dict[str, float] = {"median": 0.0}
    for block, warps in _CHOICES:

        def read(block: int = block, warps: int = warps) -> None:
            sum_tiles[(programs,)](x, out, PER_PROGRAM=_PER_PROGRAM, BLOCK=block, num_warps=warps)

        read()
        assert out.sum().item() == x.numel()
        speeds = quantiles([SIZE / (ms / 1e3) for ms in device_ms(read, rounds)])
        best = max(best, speeds, key=lambda q: q["median"])
    return best
