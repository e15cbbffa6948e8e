"""Padding measured: the same rows in a graph of exactly their size, and in a larger one, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.measure.curve import STEPS, LatencyCurve, step_ms
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.padding import PEAK_FLOPS, predicted_flops
from stepgraph.measure.result import Figure, Rows
from stepgraph.measure.stats import in_turns
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder

CHAPTER = ((9, 16), (300, 304))
"""The two that are asked for: the worst relative waste of vLLM's ladder, and a small one of a large batch."""


@dataclass(frozen=True)
class PaddedPair:
    """samples: (ms in a graph of the padded size, ms in one of the real size), a round each."""

    real: int
    padded: int
    samples: Sequence[tuple[float, float]]

    @property
    def name(self) -> str:
        return f"{self.real} → {self.padded}"

    @property
    def cost_us(self) -> list[float]:
        return [(padded - real) * 1e3 for padded, real in self.samples]


def parse_pairs(text: str) -> list[tuple[int, int]]:
    """`9:16,300:304`. Raises ConfigError for anything else."""
    try:
        pairs = [tuple(int(part) for part in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        raise ConfigError(f"pairs: {text!r} is not like 9:16,300:304") from None
    found = []
    for pair in pairs:
        if len(pair) != 2 or not 1 <= pair[0] < pair[1]:
            raise ConfigError(f"pairs: {':'.join(map(str, pair))} is not a size and a larger one, such as 9:16")
        found.append((pair[0], pair[1]))
    return found


@torch.inference_mode()
def measure_pairs(
    decode: DecodeRows, pairs: Sequence[tuple[int, int]], *, rounds: int, steps: int = STEPS
) -> list[PaddedPair]:
    """decode: its own graphs hold every real size. Further graphs of the padded sizes are captured beside them."""
    ladder = Ladder.explicit({padded for _, padded in pairs})
    wide = decode.another(GraphConfig.preset("FULL_DECODE_ONLY", ladder=ladder))
    wide.capture()
    found = []
    for real, padded in pairs:
        if (rung := ladder.rung(real)) != padded:
            raise ConfigError(f"pairs: {real} rows would run at {rung} instead of {padded}; measure them one by one")
        decode.stage(real)
        taken = in_turns(
            rounds,
            lambda: statistics.median(step_ms(decode, steps, wide)),
            lambda: statistics.median(step_ms(decode, steps)),
        )
        found.append(PaddedPair(real, padded, taken))
    wide.release()
    return found


def pair_figures(pairs: Sequence[PaddedPair], curve: LatencyCurve, config: ModelConfig | None = None) -> list[Figure]:
    """Measured, and from the curve. config: of the model, where arithmetic on a card is to stand beside them."""
    figures = []
    for pair in pairs:
        told = f"{pair.real} rows in a graph of {pair.padded}, less the same rows in a graph of {pair.real}; in turns"
        figures.append(Figure(f"{pair.name}: measured", "µs", told, pair.cost_us))
        if config is not None:
            flops = predicted_flops(config, pair.padded - pair.real)
            told = (
                f"{flops / 1e9:.3g} GFLOP (2BN, {pair.padded - pair.real} padded) at {PEAK_FLOPS / 1e12:.0f} TFLOP/s, "
                f"an H200's by its data sheet: arithmetic alone"
            )
            figures.append(Figure.of(f"{pair.name}: predicted", flops / PEAK_FLOPS * 1e6, "µs", told))
        low, high = curve.ms(pair.real), curve.ms(pair.padded)
        if low is not None and high is not None:
            told = f"time of {pair.padded} real rows less that of {pair.real}: these attend, padded rows do not"
            figures.append(Figure.of(f"{pair.name}: of the curve", (high - low) * 1e3, "µs", told))
    return figures


def pairs_table(pairs: Sequence[PaddedPair]) -> Rows:
    rows = []
    for pair in pairs:
        padded, real = (statistics.median(column) for column in zip(*pair.samples, strict=True))
        share = (pair.padded - pair.real) / pair.padded * 100
        rows.append([pair.name, share, real, padded, (padded / real - 1) * 100])
    columns = ["rows", "padded, % of rows", "exact, ms", "padded, ms", "longer, %"]
    definitions = {"exact, padded": "medians of the same rows in a graph of their size, and in the padded one"}
    return Rows("padded and exact graphs", columns, rows, definitions)
