import pytest

from stepgraph.runtime import BatchDescriptor, ConfigError


def test_tokens_are_requests_times_query_length() -> None:
    assert BatchDescriptor.decode(4, query_len=3) == BatchDescriptor(num_tokens=12, num_reqs=4, query_len=3)
    assert BatchDescriptor.decode(3, query_len=2).padded_to(4).num_tokens == 8


@pytest.mark.parametrize("fields", [(12, 4, 1), (0, None, 1), (4, 4, 0), (4, None, 1, -1)])
def test_units_that_contradict_each_other_are_refused(fields) -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(*fields)


def test_three_kinds_of_batch() -> None:
    uniform, mixed, relaxed = BatchDescriptor.decode(4, 3), BatchDescriptor.mixed(12, 4), BatchDescriptor.relaxed(12)
    assert [batch.is_uniform for batch in (uniform, mixed, relaxed)] == [True, False, False]
    assert [batch.is_relaxed for batch in (uniform, mixed, relaxed)] == [False, False, True]
    assert len({uniform, mixed, relaxed, BatchDescriptor.decode(4, 3, num_loras=1)}) == 4
    with pytest.raises(ConfigError, match="not uniform"):
        mixed.padded_to(8)


def test_every_request_brings_a_token() -> None:
    with pytest.raises(ConfigError, match="5 requests need at least a token each"):
        BatchDescriptor.mixed(4, 5)
