"""The clocks, and the limit that needs a card."""

from __future__ import annotations

import time

import pytest
import torch

from stepgraph.measure.clock import device_ms, host_us
from stepgraph.measure.stream import read_limit
from stepgraph.runtime.errors import ConfigError


def test_the_host_is_timed_without_what_comes_before() -> None:
    calls: list[str] = []
    spans = host_us(lambda: (calls.append("call"), time.sleep(0.002)), 4, before=lambda: calls.append("before"), warm=1)
    assert len(spans) == 4 and all(span >= 2000 for span in spans)
    assert calls == ["before", "call"] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to read from")
def test_the_read_limit_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        read_limit()


@pytest.mark.gpu
@pytest.mark.alone
def test_the_device_is_timed() -> None:
    spans = device_ms(lambda: torch.cuda._sleep(2_000_000), 5)
    assert len(spans) == 5 and all(0.5 < span < 10 for span in spans)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_read_limit_is_below_what_a_card_can_have() -> None:
    limit = read_limit(5)
    assert 1e11 < limit["p10"] <= limit["median"] <= limit["p90"] < 2e13
