import math
from dataclasses import FrozenInstanceError

import pytest

from stepgraph.engine.errors import RequestError
from stepgraph.engine.params import SamplingParams
from stepgraph.runtime.errors import StepgraphError


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert (params.stop, params.stop_token_ids, params.seed, params.ignore_eos) == ((), (), None, False)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0, 1, 0, 0)
    assert not params.penalises


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_penalises(field: str) -> None:
    assert SamplingParams(**{field: 2}).penalises  # type: ignore[arg-type]


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(temperature=0, top_p=1, stop="\n\n", stop_token_ids=[2, 3], seed=-(2**63))  # type: ignore
    assert isinstance(params.temperature, float) and isinstance(params.top_p, float)
    assert params.stop == ("\n\n",) and params.stop_token_ids == (2, 3) and params.seed == -(2**63)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(0.0, 1.0, stop=("\n\n",), stop_token_ids=(2, 3), seed=-(2**63)))
    with pytest.raises(FrozenInstanceError):
        params.top_k = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", True, "finite"),
        ("temperature", "0.7", "finite"),
        ("temperature", None, "finite"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.0, "an integer"),
        ("top_k", True, "an integer"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", None, "an integer"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "non-empty"),
        ("stop", None, "non-empty"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", [True], "an integer"),
        ("stop_token_ids", 5, "a sequence"),
        ("seed", 2**63, str(2**63 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("seed", 1.5, "an integer"),
        ("seed", False, "an integer"),
        ("ignore_eos", 1, "True or False"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("min_p", None, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", math.nan, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", True, "from -2 to 2"),
    ],
)
def test_bad_values_name_field_value_and_range(field: str, value: object, wanted: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field} must be") and wanted in message and "got " in message
    assert "\n" not in message and len(message) < 200
    assert isinstance(caught.value, StepgraphError)


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
