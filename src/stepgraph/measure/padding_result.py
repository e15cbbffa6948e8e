"""The padding of an engine's decode steps: the curve and the pairs measured in one process, and what a run paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.model import DecoderModel
from stepgraph.measure.curve import ON_THE_DEVICE, ON_THE_HOST, LatencyCurve, curve_table, measure_curve
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.padded_pairs import PaddedPair, measure_pairs, pair_figures, pairs_table
from stepgraph.measure.padding import Route, routes_figures, routes_table
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder

EFFORT = {"cuda": (6, 20, 5), "cpu": (2, 4, 3)}
"""Rounds of the curve, rounds of a pair, and steps of each: fewer where the host has to compute every step."""
LESS = "Without a GPU: {} rounds of the curve and {} of a pair, of {} steps each; on a GPU {} and {}, of {}."


@dataclass(frozen=True)
class Measured:
    """curve: by rows. pairs: padded and exact. config: of the model. on_device: on a GPU."""

    curve: LatencyCurve
    pairs: Sequence[PaddedPair]
    config: ModelConfig
    on_device: bool


@torch.inference_mode()
def measure_padding(
    model: DecoderModel,
    name: str,
    *,
    most: int,
    context: int,
    pairs: Sequence[tuple[int, int]],
    attention: str | None = None,
) -> Measured:
    """The curve over vLLM's sizes up to `most` rows and the pairs' own, then the pairs. name: of the model.

    Raises:
        ConfigError: sizes that cannot work.
    """
    if pairs and max(padded for _, padded in pairs) > most:
        raise ConfigError(f"padding: pairs beyond {most} rows; raise --max-rows")
    sizes = sorted({*Ladder.vllm(most).sizes, *(size for pair in pairs for size in pair)})
    graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(sizes))
    decode = DecodeRows(model, graphs, rows=most, context=context, attention=attention)
    decode.core.capture()
    of_curve, of_pairs, steps = EFFORT[model.device.type]
    clock = ON_THE_HOST if model.device.type == "cpu" else ON_THE_DEVICE
    made_of = f"{model.operations.name} operations, {decode.core.attention.name} attention"
    what = f"{name} ({made_of}), {context} tokens of context a row; {clock}"
    curve = measure_curve(decode, sizes, what, rounds=of_curve, steps=steps)
    measured = measure_pairs(decode, pairs, rounds=of_pairs, steps=steps) if pairs else []
    return Measured(curve, measured, model.config, model.device.type == "cuda")


def padding_result(
    curve: LatencyCurve, routes: Sequence[Route] = (), measured: Measured | None = None, notes: Sequence[str] = ()
) -> Result:
    """Everything that is known. measured: where it was measured now; without it the curve is an old one."""
    figures: list[Figure] = list(routes_figures(routes, curve)) if routes else []
    tables: list[Rows] = [routes_table(routes, curve)] if routes else []
    more: dict[str, Any] = {"curve": curve.to_json()}
    if measured is not None and measured.pairs:
        figures += pair_figures(measured.pairs, curve, measured.config if measured.on_device else None)
        tables.append(pairs_table(measured.pairs))
        more["pairs"] = {pair.name: [list(sample) for sample in pair.samples] for pair in measured.pairs}
    less = [] if measured is None or measured.on_device else [LESS.format(*EFFORT["cpu"], *EFFORT["cuda"])]
    return Result(
        name="padding",
        definition=f"What padded rows cost: {curve.what}.",
        figures=figures,
        tables=[*tables, curve_table(curve)],
        notes=[*less, *notes],
        more=more,
    )
