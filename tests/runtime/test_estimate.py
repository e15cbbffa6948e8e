"""Estimates: the two-sample rule as engines have it, fits that find what made the samples, profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import ConfigError
from stepgraph.runtime.memory.estimate import Fit, TwoSamples, fit, two_sample_estimate
from stepgraph.runtime.memory.profile import DeviceProfile, load_profile, save_profile

MIB = 1 << 20


def test_the_largest_and_n_minus_one_times_the_second() -> None:
    assert two_sample_estimate([TwoSamples(300 * MIB, 3 * MIB, 51)]) == 450 * MIB


def test_a_further_graph_takes_a_mib_at_least() -> None:
    assert two_sample_estimate([TwoSamples(300 * MIB, 0, 51)]) == 350 * MIB


def test_modes_share_their_largest_and_add_their_further_ones() -> None:
    modes = [TwoSamples(300 * MIB, 0, 51), TwoSamples(100 * MIB, 2 * MIB, 11)]
    assert two_sample_estimate(modes) == (300 + 50 + 20) * MIB
    assert two_sample_estimate([]) == 0


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), min_size=4, max_size=12), st.floats(0, 1e8))
def test_a_fit_never_predicts_less_for_more(points: list[tuple[float, float]], constant: float) -> None:
    samples = [({"one": 1.0, "x": x, "y": y}, constant + 2 * x - 3 * y) for x, y in points]
    found = fit(samples)
    assert all(coefficient >= 0 for coefficient in found.coefficients.values())
    assert found.miss == max(abs(found(features) - value) for features, value in samples)


def test_a_fit_finds_what_made_the_samples() -> None:
    def truth(x: float, y: float) -> float:
        return 5 * MIB + 2.0 * x + 0.5 * y

    points = [(1e6, 3e7), (2e6, 1e7), (8e6, 4e7), (4e6, 9e7)]
    found = fit([({"one": 1.0, "x": x, "y": y}, truth(x, y)) for x, y in points])
    assert found({"one": 1.0, "x": 3e6, "y": 2e7}) == pytest.approx(truth(3e6, 2e7))
    assert found.miss < 1


def test_a_feature_without_effect_is_left_out() -> None:
    found = fit([({"one": 1.0, "x": x, "never": 0.0}, 7.0) for x in (1.0, 2.0, 3.0)])
    assert found({"one": 1.0, "x": 9.0, "never": 0.0}) == pytest.approx(7.0)


@pytest.mark.parametrize("samples", [[], [({"x": 1.0}, 1.0), ({"y": 1.0}, 1.0)]])
def test_what_cannot_be_fitted(samples: list) -> None:
    with pytest.raises(ConfigError, match="a fit needs samples"):
        fit(samples)


POOL = Fit({"one": 10.0 * MIB, "logits": 2.0, "activations": 1.0, "graphs": 1.0 * MIB})
PROFILE = DeviceProfile(
    device="a device",
    total_bytes=100 << 30,
    measured_with={"torch": "2"},
    driver_before=600 * MIB,
    loaded=50 * MIB,
    workspaces=64 * MIB,
    num_sms=132,
    pool={"prefill": POOL, "decode": POOL},
    driver=Fit({"one": 2.0 * MIB, "nodes": 1000.0}),
    nodes={kind: Fit({"one": 10.0, "layers": 10.0}) for kind in ("prefill", "decode")},
)


def test_kinds_overlay_in_one_pool() -> None:
    largest = {
        "prefill": {"one": 1.0, "logits": 5.0 * MIB, "activations": 100.0 * MIB},
        "decode": {"one": 1.0, "logits": 50.0 * MIB, "activations": 20.0 * MIB},
    }
    assert PROFILE.pool_bytes(largest, {"prefill": 4, "decode": 51}) == (130 + 3 + 50) * MIB
    assert PROFILE.driver_bytes({"one": 1.0, "layers": 32.0}, {"decode": 51}) == 2 * MIB + 51 * 330 * 1000
    assert PROFILE.pool_bytes({}, {}) == PROFILE.driver_bytes({"one": 1.0, "layers": 32.0}, {}) == 0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == PROFILE


def test_the_packages_profile_is_read_or_says_that_it_is_empty() -> None:
    try:
        assert load_profile().device == "NVIDIA H200"
    except ConfigError as error:
        assert "holds no measurements yet; run benchmarks/h200_memory.py" in str(error)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"device": "x", "measured_with": {}}'])
def test_what_is_no_profile(content: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match=r"profile: .*p.json cannot be read"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("total_bytes",), -1),
        (("total_bytes",), float("inf")),
        (("loaded",), float("nan")),
        (("driver_before",), True),
        (("device",), None),
        (("measured_with",), ["torch"]),
        (("driver",), None),
        (("driver", "coefficients"), [1]),
        (("driver", "coefficients"), None),
        (("driver", "coefficients"), {"layers": 1.0}),
        (("driver", "miss"), "1"),
        (("pool", "decode", "coefficients"), {"logits": -1.0}),
        (("nodes", "prefill", "coefficients"), {"one": float("nan")}),
    ],
)
def test_damaged_fields(path: tuple[str, ...], value: object, tmp_path: Path) -> None:
    fields = place = json.loads(json.dumps(PROFILE.as_dict()))
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"profile: .*p.json cannot be read"):
        load_profile(tmp_path / "p.json")


def test_a_profile_that_is_nothing_but_brackets(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "p.json")


def test_a_profile_of_another_shape(tmp_path: Path) -> None:
    fields = json.loads(json.dumps(replace(PROFILE).as_dict()))
    del fields["pool"]["decode"]
    (tmp_path / "p.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="no field 'decode'"):
        load_profile(tmp_path / "p.json")
