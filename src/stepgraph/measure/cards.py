"""Two cards by their data sheets: nothing here was measured."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.measure.published import PUBLISHED, Published


@dataclass(frozen=True)
class Card:
    """read: bytes per second of its memory. launches: what others published of a null kernel's launch on such a card,
    its other forms included."""

    name: str
    read: float
    launches: tuple[Published, ...]


def _launches(gpu: str) -> tuple[Published, ...]:
    return tuple(one for one in PUBLISHED if one.gpu.split()[0] == gpu)


CARDS = {
    "h100": Card("H100 SXM", 3.35e12, _launches("H100")),
    "h200": Card("H200 SXM", 4.8e12, _launches("H200")),
}
"""By the name that a command line gives them."""
