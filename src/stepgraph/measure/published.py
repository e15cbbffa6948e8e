"""What others published of the null kernel's launch, with what they say it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.measure.result import Figure, Rows


@dataclass(frozen=True)
class Published:
    """us: µs. definition: in their terms."""

    gpu: str
    us: float
    source: str
    definition: str


_ISPASS = "Vellaisamy et al., ISPASS 2025 (arXiv:2504.11750), table V"
_ISPASS_IS = "start of cudaLaunchKernel to start of the null kernel, CUPTI through torch's profiler; CUDA 12.6"
_TAXBREAK = "TaxBreak, ISPASS 2026 (arXiv:2603.12465)"
_TAXBREAK_IS = "floor of the kernel launch path, by a null kernel; a mean. Where it begins and ends is not known here"

PUBLISHED = (
    Published("H100 PCIe", 2.3746, _ISPASS, _ISPASS_IS),
    Published("GH200", 2.7716, _ISPASS, _ISPASS_IS),
    Published("H100", 4.707, _TAXBREAK, _TAXBREAK_IS),
    Published("H200", 4.503, _TAXBREAK, _TAXBREAK_IS),
)


def beside(ours: Sequence[Figure]) -> Rows:
    """The published figures; where there are figures of ours, how many times as long each is, and the nearest."""
    columns, definitions = ["GPU", "µs", "source", "what they say it is"], {"µs": "as published"}
    rows: list[list[object]] = []
    for one in PUBLISHED:
        ratios = {figure.name: figure.median / one.us for figure in ours}
        nearest = [min(ratios, key=lambda name: max(ratios[name], 1 / ratios[name]))] if ratios else []
        rows.append([one.gpu, one.us, one.source, one.definition, *ratios.values(), *nearest])
    if ours:
        columns += [*(f"our {figure.name}, over it" for figure in ours), "nearest"]
        definitions["nearest"] = "of our figures by their ratio to it, whatever they are of"
    return Rows("published launches of a null kernel", columns, rows, definitions)
