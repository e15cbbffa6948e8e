"""Which keys a configuration captures, and in which order."""

from stepgraph.runtime import Backend, BatchDescriptor, GraphConfig, Ladder, Mode
from stepgraph.runtime.config import DecodePhase, PrefillPhase
from stepgraph.runtime.keys import capture_keys

decode, relaxed = BatchDescriptor.decode, BatchDescriptor.relaxed


def test_relaxed_keys_come_first_and_the_most_tokens_within_each() -> None:
    config = GraphConfig(
        DecodePhase(Backend.FULL, Ladder.explicit([1, 4]), (1, 2)),
        PrefillPhase(Backend.BREAKABLE, Ladder.explicit([2, 16])),
    )
    keys = capture_keys(config, max_requests=4, max_tokens=16)
    assert list(keys) == [relaxed(16), relaxed(2), decode(4, 2), decode(4), decode(1, 2), decode(1)]
    assert [mode for mode in keys.values()] == [Mode.BREAKABLE] * 2 + [Mode.FULL] * 4


def test_every_lora_case_has_keys_of_its_own() -> None:
    config = GraphConfig(DecodePhase(Backend.BREAKABLE, Ladder.explicit([2])), lora_cases=(0, 4))
    keys = capture_keys(config, max_requests=2, max_tokens=2)
    assert keys == {decode(2, 1, 4): Mode.BREAKABLE, decode(2, 1, 0): Mode.BREAKABLE}


def test_ladders_end_at_what_the_buffers_hold() -> None:
    config = GraphConfig(
        DecodePhase(Backend.FULL, Ladder.explicit([1, 2, 8]), (1, 4, 100)),
        PrefillPhase(Backend.FULL, Ladder.explicit([8, 64])),
    )
    keys = capture_keys(config, max_requests=6, max_tokens=20)
    assert [key for key in keys if key.is_relaxed] == [relaxed(20), relaxed(8)]
    assert {key.num_reqs for key in keys if key.query_len == 1} == {1, 2, 6}
    assert {key.num_reqs for key in keys if key.query_len == 4} == {1, 2, 5}
    assert not [key for key in keys if key.query_len == 100]


def test_a_ladder_that_ends_early_is_not_made_longer() -> None:
    config = GraphConfig(DecodePhase(Backend.FULL, Ladder.explicit([1, 96])))
    assert list(capture_keys(config, max_requests=100, max_tokens=100)) == [decode(96), decode(1)]


def test_disabled_phases_capture_nothing() -> None:
    assert capture_keys(GraphConfig(), max_requests=8, max_tokens=64) == {}
