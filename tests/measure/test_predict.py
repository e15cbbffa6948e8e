"""The chapter's arithmetic, without a GPU."""

from __future__ import annotations

import pytest
from engine.tiny import CONFIG

from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.cards import CARDS
from stepgraph.measure.predict import predict, prediction_result
from stepgraph.runtime.errors import ConfigError

LLAMA, H100 = SHAPES["llama-3-8b"], CARDS["h100"]
ISPASS = H100.launches[0].us


def test_one_gpu() -> None:
    found = predict(LLAMA, H100, 1)
    assert round(found.read_bytes / 1e9, 1) == 15.0
    assert round(found.gpu_us / 1e3, 2) == 4.48
    assert found.launches == found.about == 330
    assert round(found.host_budget_us, 1) == 13.6


def test_eight_gpus() -> None:
    found = predict(LLAMA, H100, 8)
    assert round(found.gpu_us / 1e3, 2) == 0.56
    assert (found.launches, found.about) == (394, 395)
    assert round(found.host_budget_us, 2) == 1.42
    assert round(found.submission_us(ISPASS) / 1e3, 2) == 0.94


def test_what_is_printed_has_the_arithmetic_and_its_caveats() -> None:
    result = prediction_result("llama-3-8b", LLAMA, H100, 8)
    assert result.notes[0] == "T_GPU 0.56 ms / 394 launches = 1.42 µs of the host for each."
    assert result.notes[1] == "395 × 2.37 µs = 0.94 ms of submission (Vellaisamy et al.), more than T_GPU."
    assert any("proves neither" in note for note in result.notes)
    assert all(figure.definition for figure in result.figures)


def test_on_an_h200_only_one_launch_figure_is_published() -> None:
    result = prediction_result("llama-3-8b", LLAMA, CARDS["h200"], 1)
    assert result.notes[0] == "T_GPU 3.13 ms / 330 launches = 9.48 µs of the host for each."
    assert [figure.name for figure in result.figures if figure.name.startswith("launch")] == ["launch, TaxBreak"]


def test_heads_that_cannot_be_shared_out() -> None:
    for tp in (0, 3):
        with pytest.raises(ConfigError, match="tp"):
            predict(CONFIG, H100, tp)
