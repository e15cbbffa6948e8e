"""Published figures of two cards: nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What launching an empty kernel costs, in µs. definition, source: what was measured, and who says so."""

    short: str
    us: float
    definition: str
    source: str


@dataclass(frozen=True)
class Card:
    """read: bytes per second of its memory. compute: dense bfloat16 operations per second. Both from data sheets."""

    name: str
    read: float
    compute: float
    launches: tuple[Launch, ...]


_ISPASS = "cudaLaunchKernel's start to the null kernel's start in a profiler trace, mean; CUDA 12.6"
_TAXBREAK = "floor of the launch path of a null kernel, mean"
_ISPASS_SOURCE = "Vellaisamy et al., ISPASS 2025 (arXiv:2504.11750), Table V"
_TAXBREAK_SOURCE = "TaxBreak (arXiv:2603.12465)"

CARDS = {
    "h100": Card(
        "H100 SXM",
        3.35e12,
        989e12,
        (
            Launch("ISPASS 2025", 2.3746, f"{_ISPASS}, on an H100 PCIe", _ISPASS_SOURCE),
            Launch("TaxBreak", 4.707, _TAXBREAK, _TAXBREAK_SOURCE),
        ),
    ),
    "h200": Card("H200 SXM", 4.8e12, 989e12, (Launch("TaxBreak", 4.503, _TAXBREAK, _TAXBREAK_SOURCE),)),
}
"""By the name that a command line gives them."""
