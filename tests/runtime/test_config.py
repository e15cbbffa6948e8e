import dataclasses
from collections.abc import Callable

import pytest

from stepgraph.runtime import Backend, ConfigError, GraphConfig, Ladder
from stepgraph.runtime.config import Debug, DecodePhase, PrefillPhase

DECODE, TOKENS = Ladder.explicit([1, 2]), Ladder.explicit([4, 8])


@pytest.mark.parametrize(
    ("mode", "decode", "prefill"),
    [
        ("NONE", Backend.DISABLED, Backend.DISABLED),
        ("FULL_DECODE_ONLY", Backend.FULL, Backend.DISABLED),
        ("FULL", Backend.FULL, Backend.FULL),
        ("PIECEWISE", Backend.BREAKABLE, Backend.BREAKABLE),
        ("FULL_AND_PIECEWISE", Backend.FULL, Backend.BREAKABLE),
    ],
)
def test_presets_take_vllms_names(mode: str, decode: Backend, prefill: Backend) -> None:
    config = GraphConfig.preset(mode, ladder=DECODE, prefill_ladder=TOKENS, query_lens=(1, 4), debug="checks")
    assert (config.decode.backend, config.prefill.backend) == (decode, prefill)
    assert config.decode.ladder == (None if decode is Backend.DISABLED else DECODE)
    assert config.prefill.ladder == (None if prefill is Backend.DISABLED else TOKENS)
    assert config.decode.query_lens == (1, 4) and config.debug is Debug.CHECKS


def test_a_configuration_is_frozen_and_captures_nothing_by_default() -> None:
    assert GraphConfig() == GraphConfig.preset("NONE")
    with pytest.raises(dataclasses.FrozenInstanceError):
        GraphConfig().warmups = 2  # type: ignore[misc]


def test_names_and_lists_become_what_they_stand_for() -> None:
    config = GraphConfig(DecodePhase("full", DECODE, [1, 4]), PrefillPhase("breakable", TOKENS), [0, 2], debug="checks")
    phases = DecodePhase(Backend.FULL, DECODE, (1, 4)), PrefillPhase(Backend.BREAKABLE, TOKENS)
    assert config == GraphConfig(*phases, (0, 2), debug=Debug.CHECKS) and hash(config)
    assert config.decode.backend is Backend.FULL and config.prefill.backend is Backend.BREAKABLE


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GraphConfig.preset("FULLISH"), "unknown mode 'FULLISH'"),
        (lambda: GraphConfig.preset("FULL_DECODE_ONLY"), "decode: backend full needs a ladder"),
        (lambda: GraphConfig.preset("FULL", ladder=DECODE), "prefill: backend full needs a ladder"),
        (lambda: GraphConfig(warmups=-1), "-1 warm-ups"),
        (lambda: GraphConfig(debug="loud"), "unknown debug 'loud'; known are off, checks, eager-through-graph"),
        (lambda: GraphConfig(lora_cases=()), "LoRA cases"),
        (lambda: GraphConfig(lora_cases=(4, 0)), "must ascend"),
        (lambda: GraphConfig(lora_cases=(0, 0)), "each once"),
        (lambda: GraphConfig(lora_cases=(-1, 0)), "0 or more"),
        (lambda: DecodePhase(query_lens=()), "query lengths"),
        (lambda: DecodePhase(query_lens=(0,)), "at least 1"),
        (lambda: DecodePhase(query_lens=(2, 2)), "distinct"),
        (lambda: PrefillPhase(max_requests=0), "needs at least one"),
        (lambda: PrefillPhase(pad_factor=0.5), "pad_factor 0.5 must be at least 1"),
        (lambda: PrefillPhase(pad_factor=float("nan")), "pad_factor nan"),
        (lambda: PrefillPhase(pad_floor=-1), "pad_floor -1 at least 0"),
        (lambda: PrefillPhase(pad_floor=1.5), "pad_floor: 1.5 is not a whole number"),
        (lambda: PrefillPhase(pad_factor="2"), "pad_factor 2 must be"),
        (lambda: PrefillPhase(max_requests=2.0), "max_requests: 2.0 is not a whole number"),
        (
            lambda: PrefillPhase("eager"),
            "prefill: unknown backend 'eager'; known are full, breakable, piecewise, disabled",
        ),
        (
            lambda: DecodePhase("FULL", DECODE),
            "decode: unknown backend 'FULL'; known are full, breakable, piecewise, disabled",
        ),
        (lambda: DecodePhase(None, DECODE), "decode: unknown backend None"),
        (lambda: DecodePhase(Backend.FULL, [1, 2]), r"decode: ladder \[1, 2\] is not a Ladder"),
        (lambda: DecodePhase(query_lens=4), r"query lengths 4: give them as a tuple, such as \(1,\)"),
        (lambda: DecodePhase(query_lens=(True,)), "query lengths: True is not a whole number"),
        (lambda: GraphConfig(warmups=1.0), "warmups: 1.0 is not a whole number"),
        (lambda: GraphConfig(lora_cases=3), "LoRA cases 3: give them as a tuple"),
        (lambda: GraphConfig(lora_cases=(0, 1.5)), "LoRA cases: 1.5 is not a whole number"),
        (lambda: GraphConfig(lora_cases=["0"]), "LoRA cases: '0' is not a whole number"),
        (lambda: GraphConfig.preset("NONE", debug="loud"), "unknown debug 'loud'; known are off, checks"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
