"""What padding costs in rows and in time."""

import json
from pathlib import Path

import pytest
import torch
from engine.tiny import tiny_model

from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.curve import LatencyCurve
from stepgraph.measure.padded_pairs import PaddedPair, pair_figures, pairs_table, parse_pairs
from stepgraph.measure.padding import (
    PEAK_FLOPS,
    Route,
    load_routes,
    predicted_flops,
    routes_figures,
    routes_table,
    to_prometheus,
)
from stepgraph.measure.padding_result import EFFORT, measure_padding, padding_result
from stepgraph.runtime import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CURVE = LatencyCurve({8: [5.0], 9: [5.25], 16: [6.0]}, "a step")
ROUTES = [
    Route("uniform", 1, 9, 16, "FULL", "padded", 100),
    Route("uniform", 1, 8, 8, "FULL", "exact", 50),
    Route("uniform", 1, 20, 24, "FULL", "padded", 2),
    Route("uniform", 1, 30, 30, "EAGER", "above_ladder", 1),
    Route("uniform", 4, 12, 16, "FULL", "padded", 3),
    Route("mixed", 0, 94, 128, "FULL", "padded", 1),
]


def test_the_published_prediction() -> None:
    """Padding 300 to 304: about 64 GFLOP, about 65 µs."""
    flops = predicted_flops(SHAPES["llama-3-8b"], 304 - 300)
    assert round(flops / 1e9) == 64 and round(flops / PEAK_FLOPS * 1e6) == 65


def test_rows_and_time_of_each_route() -> None:
    table = routes_table(ROUTES, CURVE)
    rows = {(row[1], row[2], row[4]): list(row) for row in table.rows}
    assert rows[9, 16, "16 requests"][5:] == [100, 700, 750.0, 75.0]
    assert rows[8, 8, "8 requests"][6:] == [0, 0.0, 0.0]
    assert rows[20, 24, "24 requests"][6:] == [8, None, None]  # beyond the curve
    assert rows[30, 30, ""][6] == 0
    assert rows[12, 16, "4 requests of 4 tokens"][6:] == [12, None, None]  # the curve is of one token a request
    assert rows[94, 128, "128 tokens"][6:] == [34, None, None]
    assert table.rows[0][1] == 9  # the dearest first


def test_totals_say_what_they_cover() -> None:
    figures = {figure.name: figure for figure in routes_figures(ROUTES, CURVE)}
    computed = 16 * 100 + 8 * 50 + 24 * 2 + 30 + 16 * 3 + 128
    assert figures["padded rows"].median == pytest.approx((700 + 8 + 12 + 34) / computed * 100)
    assert figures["time of padding"].median == pytest.approx(75.0)
    assert figures["time of padding, share"].median == pytest.approx(75.0 / (600 + 250) * 100)
    assert "over 150 decode steps of 157" in figures["time of padding"].definition
    assert len(routes_figures(ROUTES[4:], CURVE)) == 1  # the curve knows none of them


def test_prometheus_text() -> None:
    text = to_prometheus(ROUTES[:2] + ROUTES[5:], CURVE)
    label = 'kind="uniform",real="9",padded="16",mode="FULL",key="16 requests",reason="padded"'
    assert f"stepgraph_padding_steps_total{{{label}}} 100\n" in text
    assert f"stepgraph_padding_rows_total{{{label}}} 700\n" in text
    assert f"stepgraph_padding_seconds{{{label}}} 0.075\n" in text
    assert text.count("stepgraph_padding_seconds{") == 2 and text.count("# TYPE") == 3 and text.endswith("\n")


def test_a_runs_routes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"routes": [vars(route) for route in ROUTES]}), encoding="utf-8")
    assert load_routes(path) == ROUTES
    for text in ("{}", '{"routes": [{"kind": "uniform"}]}', "nonsense", '{"routes": 3}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="holds no routes"):
            load_routes(path)
    path.write_text('{"routes": []}', encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no steps"):
        load_routes(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_routes(tmp_path)


def test_pairs_are_parsed() -> None:
    assert parse_pairs("9:16,300:304") == [(9, 16), (300, 304)]
    for text in ("9", "16:9", "9:9", "0:4", "9:16:24", "a:b", ""):
        with pytest.raises(ConfigError, match="pairs"):
            parse_pairs(text)


def test_measured_predicted_and_curve_stand_together() -> None:
    pair = PaddedPair(9, 16, [(5.5, 5.3), (5.4, 5.3)])
    figures = {figure.name: figure for figure in pair_figures([pair], CURVE, SHAPES["llama-3-8b"])}
    assert figures["9 → 16: measured"].samples == pytest.approx([200.0, 100.0])
    assert figures["9 → 16: predicted"].median == pytest.approx(113.7, abs=0.1)
    assert figures["9 → 16: of the curve"].median == pytest.approx(750.0)
    assert len(pair_figures([pair], LatencyCurve({1: [1.0]}, "short"))) == 1
    assert list(pairs_table([pair]).rows[0])[:4] == ["9 → 16", 43.75, 5.3, pytest.approx(5.45)]


def test_the_same_rows_run_padded_and_exact() -> None:
    model = tiny_model(DEVICE)
    found = measure_padding(model, "tiny", most=8, context=20, pairs=[(3, 4), (5, 8)])
    of_curve, rounds, steps = EFFORT[DEVICE]
    assert found.curve.sizes == [1, 2, 3, 4, 5, 8]
    assert [(pair.real, pair.padded, len(pair.samples)) for pair in found.pairs] == [(3, 4, rounds), (5, 8, rounds)]
    assert {len(samples) for samples in found.curve.samples.values()} == {of_curve * steps}
    result = padding_result(found.curve, ROUTES, found)
    assert any("2 rounds of the curve" in note for note in result.notes) is (DEVICE == "cpu")
    told = result.to_json()
    assert set(told["pairs"]) == {"3 → 4", "5 → 8"} and set(told["curve"]["samples"]) == {"1", "2", "3", "4", "5", "8"}
    assert ("3 → 4: predicted" in told["samples"]) is (DEVICE == "cuda")
    assert [table.title for table in result.tables] == [
        "padding of the run",
        "padded and exact graphs",
        "latency curve",
    ]


def test_pairs_that_cannot_run_as_asked() -> None:
    model = tiny_model(DEVICE)
    with pytest.raises(ConfigError, match="beyond 4 rows"):
        measure_padding(model, "tiny", most=4, context=20, pairs=[(3, 8)])
    with pytest.raises(ConfigError, match="2 rows would run at 3 instead of 8"):
        measure_padding(model, "tiny", most=8, context=20, pairs=[(1, 3), (2, 8)])
