"""How fast this card multiplies matrices: the limit of arithmetic, measured as the read limit is."""

from __future__ import annotations

import torch

from stepgraph.measure.clock import device_ms
from stepgraph.measure.stats import quantiles
from stepgraph.runtime.errors import ConfigError

SIDE = 8192

DEFINITION = f"Operations over seconds of a bfloat16 product of two {SIDE} x {SIDE} matrices by cuBLAS."


def compute_limit(rounds: int = 20) -> dict[str, float]:
    """Floating-point operations per second: median, p10 and p90.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("the limit of arithmetic is measured on a CUDA device; there is none")
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return quantiles([2 * SIDE**3 / (ms / 1e3) for ms in device_ms(lambda: torch.mm(a, b, out=out), rounds)])
