"""Rotary settings: the frequencies equal transformers', both spellings are read, contradictions are errors."""

from __future__ import annotations

from typing import Any

import pytest

from stepgraph.engine.errors import ModelError
from stepgraph.engine.rope import read_rope

HEAD_DIM, POSITIONS = 64, 8192
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        {**LLAMA3, "factor": 32, "low_freq_factor": 2, "original_max_position_embeddings": 64},
        YARN,
        {**YARN, "beta_fast": 16, "beta_slow": 2.0},
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
        {**YARN, "factor": None},
        {**YARN, "original_max_position_embeddings": 8},
    ],
)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_frequencies_equal_transformers(scaling: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters={"factor": 1.0, **parameters} if scaling["factor"] is None else dict(parameters),
    )
    if scaling["factor"] is None:
        config.rope_parameters["factor"] = None  # its own check refuses what its formula takes
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = read_rope({"rope_parameters": parameters}, HEAD_DIM, POSITIONS, "test")
    assert rope.frequencies == tuple(frequencies.tolist())
    assert (rope.scale, rope.theta) == (scale, theta)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "default"}, POSITIONS),
        ({"rope_type": "dynamic", "factor": 4.0}, POSITIONS),  # static up to there
        ({"rope_type": "linear", "factor": 2.5}, 20480),
        (LLAMA3, POSITIONS),
        (YARN, POSITIONS),
        ({**YARN, "factor": 8.0}, 16384),
    ],
)
def test_positions_that_scaling_reaches(scaling: dict[str, Any], positions: int) -> None:
    assert read_rope({"rope_scaling": scaling}, HEAD_DIM, POSITIONS, "test").max_positions == positions


def test_both_spellings_are_the_same() -> None:
    new = read_rope({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, HEAD_DIM, POSITIONS, "test")
    kind = {"type": "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}}
    old = read_rope({"rope_theta": 500000, "rope_scaling": kind}, HEAD_DIM, POSITIONS, "test")
    both = {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": LLAMA3, "rope_theta": 5e5}
    assert new == old == read_rope(both, HEAD_DIM, POSITIONS, "test")
    assert read_rope({"rope_scaling": None}, HEAD_DIM, POSITIONS, "test").frequencies is None
    length = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    outside = {"rope_scaling": length, "original_max_position_embeddings": 2048}
    assert read_rope(outside, HEAD_DIM, POSITIONS, "t") == read_rope({"rope_scaling": YARN}, HEAD_DIM, POSITIONS, "t")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type 'longrope' is not supported; known:",
        ),
        ({"rope_scaling": {"rope_type": ["x"], "factor": 4.0}}, "is not supported; known: default, dynamic, linear"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2], "factor": 1}}, "rope_type 'mrope' is not supported"),
        ({"rope_scaling": "linear"}, "must be objects, got 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0 and at most 1e+30, it is absent"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "got '4'"),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, "gives more than 2147483647 positions"),
        ({"rope_scaling": {"type": "dynamic"}}, "it is absent"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4 must be below high_freq_factor 4"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor must be a number above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast must be"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1.5}}, "must be an integer from 1"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor must be a number above 0"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta 1 rotates all pairs alike"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is given as 500000.0 and as 10000.0"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_type is given as 'linear' and as 'yarn'"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_type is given as 'default' and as"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 512}, "is given as 2048 and as 512"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for 'full_attention' alone are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_wrong_or_contradictory_is_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_rope(fields, HEAD_DIM, POSITIONS, "config.json")
    message = str(caught.value)
    assert says in message and message.startswith("config.json: ") and "\n" not in message
