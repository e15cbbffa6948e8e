"""What a capture will take, before it is made: the two-sample rule that engines use, and a fit of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepgraph.runtime.errors import ConfigError

LEAST_MARGINAL = 1 << 20
"""Bytes that the two-sample rule takes a further graph to need at least."""

Features = Mapping[str, float]
"""Quantities that bytes may grow with, by name."""


@dataclass(frozen=True)
class TwoSamples:
    """What the two largest captures of a mode took, in bytes, and how many there will be."""

    first: int
    second: int
    graphs: int

    @property
    def further(self) -> int:
        """What the graphs after the first are taken to need."""
        return max(self.second, LEAST_MARGINAL) * (self.graphs - 1)


def two_sample_estimate(modes: Sequence[TwoSamples]) -> int:
    """The largest capture and N - 1 times the second's. Modes share a pool and never run at the same time: of their
    largest captures the largest counts, of the further graphs all do."""
    return max((mode.first for mode in modes), default=0) + sum(mode.further for mode in modes)


@dataclass(frozen=True)
class Fit:
    """value ≈ the sum of coefficient times feature. No coefficient is below 0: more of anything takes no less.

    miss: the largest miss among the samples that it was fitted to, in their unit.
    """

    coefficients: Mapping[str, float]
    miss: float = 0.0

    def __call__(self, features: Features) -> float:
        return sum(coefficient * features[name] for name, coefficient in self.coefficients.items())


def fit(samples: Sequence[tuple[Features, float]]) -> Fit:
    """The least-squares fit. Features that would be given a coefficient below 0 are left out, the worst first.

    Raises:
        ConfigError: no samples, or samples of different features.
    """
    names = list(samples[0][0]) if samples else []
    if not names or any(list(features) != names for features, _ in samples):
        raise ConfigError("a fit needs samples, all of the same features")
    matrix = np.array([[features[name] for name in names] for features, _ in samples], dtype=float)
    scale = np.abs(matrix).max(axis=0)
    values = np.array([value for _, value in samples], dtype=float)
    kept = [place for place in range(len(names)) if scale[place] > 0]
    weights = np.zeros(0)
    while kept:
        weights = np.linalg.lstsq(matrix[:, kept] / scale[kept], values, rcond=None)[0]
        if weights.min() >= 0:
            break
        del kept[int(weights.argmin())]
    coefficients = {names[place]: float(weight / scale[place]) for place, weight in zip(kept, weights, strict=False)}
    found = Fit(coefficients)
    return Fit(coefficients, max(abs(found(features) - value) for features, value in samples))
