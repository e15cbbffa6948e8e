"""Ladders: the published sizes, and what must hold for any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import ConfigError, Ladder, sglang_default_ceiling, vllm_default_ceiling

sizes = st.sets(st.integers(1, 2048), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("ladder", "count"),
    [
        (Ladder.vllm(512), 51),
        (Ladder.vllm(512, interactivity=True), 76),
        (Ladder.sglang(256), 36),
        (Ladder.sglang(512), 52),
        (Ladder.sglang(48), 10),
        (Ladder.sglang(256, speculative=True), 51),
        (Ladder.sglang(512, speculative=True), 67),
        (Ladder.sglang(32, speculative=True), 20),
    ],
)
def test_published_counts(ladder: Ladder, count: int) -> None:
    assert len(ladder) == count


def test_vllm_sizes() -> None:
    assert Ladder.vllm(512).sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert Ladder.vllm(512).sizes[-2:] == (496, 512)
    assert Ladder.vllm(512).sizes[33:36] == (248, 256, 272)
    assert Ladder.vllm(100).max_size == 100


def test_sglang_sizes() -> None:
    assert Ladder.sglang(256).sizes[:6] == (1, 2, 4, 8, 12, 16)
    assert Ladder.sglang(512).sizes[-2:] == (496, 512)


@pytest.mark.parametrize(("chunk", "count"), [(512, 30), (2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_sglangs_prefill_counts(chunk: int, count: int) -> None:
    assert len(Ladder.sglang_prefill(chunk)) == count


def test_sglangs_prefill_sizes() -> None:
    ladder = Ladder.sglang_prefill(5000)
    assert ladder.sizes[:10] == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert ladder.sizes[-3:] == (4096, 4608, 5000)
    assert {256, 288, 512, 576, 1024, 1280} <= set(ladder.sizes)
    worst = max(ladder.rung(tokens) / tokens for tokens in range(8, 4097))  # type: ignore[operator]
    assert worst == pytest.approx(1.455, abs=1e-3)


def test_the_maximum_is_no_rung_where_the_engines_leave_it_out() -> None:
    assert Ladder.vllm(100, append_max=False).max_size == 96
    assert Ladder.vllm(96, append_max=False) == Ladder.vllm(96)
    assert Ladder.sglang_prefill(5000, append_max=False).max_size == 4608
    with pytest.raises(ConfigError, match="no sizes"):
        Ladder.sglang_prefill(3, append_max=False)


def test_tokens_become_requests() -> None:
    assert Ladder.vllm(100, append_max=False).in_requests(4).sizes == (1, *range(2, 25, 2))
    assert Ladder.vllm(16).in_requests(1) == Ladder.vllm(16)
    with pytest.raises(ConfigError, match="no size in tokens is a multiple of the query length 3"):
        Ladder.explicit([2, 4]).in_requests(3)
    with pytest.raises(ConfigError, match="query length of 0"):
        Ladder.explicit([2, 4]).in_requests(0)


@given(sizes, st.integers(1, 8))
def test_a_ladder_in_requests_holds_the_same_tokens(chosen: set[int], query_len: int) -> None:
    fitting = {size for size in chosen if size % query_len == 0}
    if fitting:
        ladder = Ladder.explicit(chosen).in_requests(query_len)
        assert {size * query_len for size in ladder.sizes} == fitting


def test_the_chapters_paddings() -> None:
    assert Ladder.sglang(256).rung(9) == 12
    assert Ladder.vllm(512).rung(9) == 16
    assert Ladder.vllm(512).rung(13) == 16
    assert Ladder.vllm(512).rung(300) == 304


@pytest.mark.parametrize(
    "rule", [Ladder.vllm, Ladder.sglang, lambda n: Ladder.sglang(n, speculative=True), Ladder.sglang_prefill]
)
@given(max_size=st.integers(1, 1100))
def test_the_maximum_is_always_a_rung(rule, max_size: int) -> None:
    assert rule(max_size).max_size == max_size


@given(sizes, st.integers(1, 2100))
def test_the_rung_is_the_smallest_that_holds_the_size(chosen: set[int], size: int) -> None:
    ladder = Ladder.explicit(chosen)
    fitting = [rung for rung in chosen if rung >= size]
    assert ladder.rung(size) == (min(fitting) if fitting else None)


@given(sizes)
def test_rungs_are_monotone(chosen: set[int]) -> None:
    ladder = Ladder.explicit(chosen)
    rungs = [ladder.rung(size) for size in range(1, ladder.max_size + 1)]
    assert rungs == sorted(rungs)


@given(sizes, st.integers(1, 2100))
def test_a_cut_ladder_covers_everything_below_the_cut(chosen: set[int], limit: int) -> None:
    cut = Ladder.explicit(chosen).upto(limit)
    assert cut.max_size == min(limit, max(chosen))


@pytest.mark.parametrize(
    ("given_sizes", "says"),
    [([], "no sizes"), ([0, 1], "not positive"), ([-4], "not positive"), ([2, 2], "more than once"), ([True], "whole")],
)
def test_bad_sizes_are_named(given_sizes: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ladder.explicit(given_sizes)


@pytest.mark.parametrize("text", ["", "1,,2", "vllm2", "1.5", "1;2"])
def test_what_is_no_ladder_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither vllm, sglang nor sizes"):
        Ladder.parse(text, 16)


@pytest.mark.parametrize("make", [lambda: Ladder.explicit([1, 10**9]), lambda: Ladder.vllm(10**9)])
def test_sizes_beyond_any_batch_are_refused(make) -> None:
    with pytest.raises(ConfigError, match="above 65536"):
        make()


def test_parse() -> None:
    assert Ladder.parse("vllm", 16) == Ladder.vllm(16)
    assert Ladder.parse("sglang", 16) == Ladder.sglang(16)
    assert Ladder.parse("8,1,2", 999).sizes == (1, 2, 8)


def test_vllms_ceiling() -> None:
    assert vllm_default_ceiling(13) == 26
    assert vllm_default_ceiling(256) == 512
    assert vllm_default_ceiling(1024, blackwell=True) == 1024
    assert vllm_default_ceiling(64, query_len=4) == 512
    assert vllm_default_ceiling(256, max_num_batched_tokens=300) == 300


@pytest.mark.parametrize(
    ("memory_gb", "tensor_parallel", "ceiling"),
    [(16, 1, 8), (24, 1, 48), (24, 4, 160), (48, 1, 32), (80, 1, 256), (80, 4, 512), (141, 1, 256), (192, 1, 512)],
)
def test_sglangs_ceiling(memory_gb: float, tensor_parallel: int, ceiling: int) -> None:
    assert sglang_default_ceiling(memory_gb, tensor_parallel) == ceiling


def test_sglangs_ceiling_of_an_unknown_device() -> None:
    assert sglang_default_ceiling(None) == 160
