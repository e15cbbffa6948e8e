import pytest

from stepgraph.runtime import BatchDescriptor, ConfigError


def test_tokens_are_requests_times_query_length() -> None:
    assert BatchDescriptor.decode(4, query_len=3) == BatchDescriptor(num_tokens=12, num_reqs=4, query_len=3)
    assert BatchDescriptor.decode(3, query_len=2).padded_to(4).num_tokens == 8


@pytest.mark.parametrize("fields", [(12, 4, 1), (0, None, 1), (4, 4, 0), (4, None, 1, -1)])
def test_units_that_contradict_each_other_are_refused(fields) -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(*fields)
