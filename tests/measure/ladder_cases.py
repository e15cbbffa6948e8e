"""What the tests of fitted ladders share: Azure's excerpt, and a curve that is made up."""

from __future__ import annotations

from pathlib import Path

from stepgraph.measure.curve import LatencyCurve
from stepgraph.measure.ladder_fit.step_times import StepTimes

AZURE = Path(__file__).parent / "azure" / "conv_excerpt.csv"


def straight(largest: int, ms: float = 4.0, ms_a_row: float = 0.02) -> StepTimes:
    """A step takes `ms`, and so much for each row."""
    samples = {size: [ms + ms_a_row * size] for size in range(1, largest + 1)}
    return StepTimes.of(LatencyCurve(samples, "made up for a test"))
