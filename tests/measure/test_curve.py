"""The latency curve: between its points, through a file, and measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.tiny import tiny_model

from stepgraph.measure.curve import LatencyCurve, curve_result, load_curve, measure_curve, step_ms
from stepgraph.measure.decode import DecodeRows
from stepgraph.runtime import ConfigError, GraphConfig, Ladder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CURVE = LatencyCurve({1: [4.0, 5.0, 6.0], 8: [5.5], 16: [7.5, 7.5]}, "a step")


def test_between_measured_sizes_lies_a_straight_line() -> None:
    assert [CURVE.ms(rows) for rows in (1, 8, 12, 16)] == [5.0, 5.5, 6.5, 7.5]
    assert CURVE.ms(0) is None and CURVE.ms(17) is None
    assert LatencyCurve({4: [1.0]}, "one").ms(4) == 1.0


def test_a_curve_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(curve_result(CURVE).to_json()), encoding="utf-8")
    assert load_curve(path) == CURVE
    path.write_text(json.dumps({"curve": replace(CURVE, token_ns=23.5).to_json()}), encoding="utf-8")
    assert load_curve(path).token_ns == 23.5


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 100_000, '{"curve": 3}', '{"curve": {"what": "x", "samples": {}}}',
             '{"curve": {"what": "x", "samples": {"1": []}}}', '{"curve": {"what": "x", "samples": {"one": [1]}}}',
             '{"curve": {"samples": {"1": [1]}}}'],
)  # fmt: skip
def test_a_file_without_a_curve(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no latency curve"):
        load_curve(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_curve(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ('"samples": {"0": [1]}', "between 1 and 65536"),
        ('"samples": {"1": [1], "99999999999": [1]}', "between 1 and 65536"),
        ('"samples": {"1": [1, 0]}', "must be positive"),
        ('"samples": {"1": [NaN]}', "must be positive"),
        ('"samples": {"1": [1e300]}', "below an hour"),
        ('"samples": {"1": [1]}, "token_ns": -1', "token_ns is -1"),
        ('"samples": {"1": [1]}, "token_ns": NaN', "token_ns is nan"),
    ],
)
def test_sizes_and_times_that_cannot_be(tmp_path: Path, curve: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(f'{{"curve": {{"what": "x", {curve}}}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_curve(path)


def test_each_size_is_a_row_of_the_table() -> None:
    (table,) = curve_result(CURVE).tables
    assert [list(row)[:2] for row in table.rows] == [[1, 5.0], [8, 5.5], [16, 7.5]]
    assert table.rows[2][4] == pytest.approx(7500 / 16)


@torch.inference_mode()
def test_it_is_measured_on_graphs_of_their_own() -> None:
    graphs = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([1, 3, 4]))
    decode = DecodeRows(tiny_model(DEVICE), graphs, rows=4, context=20)
    decode.core.capture()
    curve = measure_curve(decode, [4, 1, 3], "a tiny step", rounds=2)
    assert curve.sizes == [1, 3, 4] and all(len(taken) == 10 for taken in curve.samples.values())
    assert all(ms > 0 for taken in curve.samples.values() for ms in taken)
    assert set(decode.runner.stats.by_reason()) == {"exact"}
    eager = decode.another(GraphConfig.preset("NONE"))
    assert len(step_ms(decode, 4, eager)) == 4 and eager.stats.by_mode()["EAGER"] >= 4
