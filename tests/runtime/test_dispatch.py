"""Dispatch: right key, a reason for every answer, and quick."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import Backend, BatchDescriptor, Decision, Dispatcher, GraphConfig, Ladder, Mode, Reason
from stepgraph.runtime.cliffs import cliffs
from stepgraph.runtime.config import DecodePhase, PrefillPhase
from stepgraph.runtime.dispatch import MOST_PASSING
from stepgraph.runtime.keys import capture_keys

decode, mixed, relaxed = BatchDescriptor.decode, BatchDescriptor.mixed, BatchDescriptor.relaxed


def dispatcher(
    config: GraphConfig, rows: int = 600, tokens: int = 8192, dropped: tuple[BatchDescriptor, ...] = ()
) -> Dispatcher:
    keys = capture_keys(config, max_requests=rows, max_tokens=tokens)
    left = {key: mode for key, mode in keys.items() if key not in dropped}
    return Dispatcher(config, rows, left, {key: "out of memory" for key in dropped})


def decode_only(ladder: Ladder, query_lens: tuple[int, ...] = (1,)) -> GraphConfig:
    return GraphConfig(DecodePhase(Backend.FULL, ladder, query_lens))


BOTH = GraphConfig(
    DecodePhase(Backend.FULL, Ladder.vllm(16)), PrefillPhase(Backend.BREAKABLE, Ladder.explicit([4, 16, 64, 256]))
)


def test_the_chapters_paddings() -> None:
    on_sglang = dispatcher(decode_only(Ladder.sglang(256))).dispatch(decode(9))
    on_vllm = dispatcher(decode_only(Ladder.vllm(512))).dispatch(decode(9))
    assert (on_sglang.padded, (on_sglang.padded - 9) / on_sglang.padded) == (12, 0.25)
    assert (on_vllm.padded, (on_vllm.padded - 9) / on_vllm.padded) == (16, 0.4375)


def test_the_chapters_walk() -> None:
    table = dispatcher(BOTH, rows=16, tokens=256)
    thirteen = table.dispatch(decode(13))
    assert (thirteen.mode, thirteen.key, thirteen.reason) == (Mode.FULL, decode(16), Reason.PADDED)
    with_two_tokens = table.dispatch(mixed(14, 13))
    assert (with_two_tokens.mode, with_two_tokens.key) == (Mode.BREAKABLE, relaxed(16))
    assert (with_two_tokens.real, with_two_tokens.padded) == (14, 16)


def brute_force(
    config: GraphConfig, rows: int, captured: dict[BatchDescriptor, Mode], batch: BatchDescriptor
) -> tuple[Mode, BatchDescriptor]:
    """The rules once more, as a search over all keys."""
    cases = [case for case in config.lora_cases if case >= batch.num_loras]
    assert batch.num_reqs is not None
    keys = [key for key in captured if cases and key.num_loras == cases[0]]
    own = [
        key
        for key in keys
        if not key.is_relaxed and key.query_len == batch.query_len and (key.num_reqs or 0) >= batch.num_reqs
    ]
    if own:
        key = min(own, key=lambda key: key.num_reqs or 0)
        return captured[key], key
    prefill = config.prefill
    loose = [key for key in keys if key.is_relaxed and key.num_tokens >= batch.num_tokens]
    slots = rows if prefill.max_requests is None else min(rows, prefill.max_requests)
    if loose and batch.num_reqs <= slots:
        key = min(loose, key=lambda key: key.num_tokens)
        if key.num_tokens <= prefill.pad_floor or key.num_tokens <= prefill.pad_factor * batch.num_tokens:
            return captured[key], key
    return Mode.EAGER, batch


ladders = st.builds(Ladder.explicit, st.sets(st.integers(1, 40), min_size=1, max_size=5))
backends = st.sampled_from(Backend)
query_lens = st.lists(st.integers(1, 4), min_size=1, max_size=2, unique=True).map(tuple)
configs = st.builds(
    GraphConfig,
    st.builds(DecodePhase, backends, ladders, query_lens),
    st.builds(
        PrefillPhase,
        backends,
        ladders,
        st.none() | st.integers(1, 12),
        st.sampled_from([1.0, 1.5, 2.0]),
        st.integers(0, 20),
    ),
    st.sets(st.integers(0, 4), min_size=1, max_size=3).map(lambda cases: tuple(sorted(cases))),
)


@given(configs, st.data())
def test_it_equals_a_search_over_all_keys(config: GraphConfig, data: st.DataObject) -> None:
    rows, tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(4, 48))
    keys = capture_keys(config, max_requests=rows, max_tokens=tokens)
    dropped = data.draw(st.sets(st.sampled_from(list(keys)))) if keys else set()
    captured = {key: mode for key, mode in keys.items() if key not in dropped}
    table = Dispatcher(config, rows, captured, {key: "out of memory" for key in dropped})
    loras = data.draw(st.integers(0, 5))
    uniform = [decode(n, q, loras) for q in (1, 2, 3, 4) for n in range(1, rows + 1)]
    for batch in [*uniform, *(mixed(t, n, loras) for t in range(1, tokens + 1) for n in range(1, min(t, rows) + 1))]:
        decision = table.dispatch(batch)
        assert (decision.mode, decision.key) == brute_force(config, rows, captured, batch)
        assert decision is table.dispatch(batch) and decision.detail
        assert decision.padded >= decision.real
        if not decision.key.is_relaxed:  # the two units are never mixed
            assert decision.key.query_len == batch.query_len
        if decision.reason is Reason.SIZE_DROPPED:
            assert "out of memory" in decision.detail and dropped
        if decision.reason is Reason.TOO_MANY_LORAS:
            assert loras > config.lora_cases[-1]


def test_a_dropped_size_hands_its_batches_to_the_next() -> None:
    table = dispatcher(decode_only(Ladder.explicit([2, 4, 8])), dropped=(decode(4), decode(8)))
    assert [table.dispatch(decode(n)).reason for n in (1, 2, 3)] == [Reason.PADDED, Reason.EXACT, Reason.SIZE_DROPPED]
    table = dispatcher(decode_only(Ladder.explicit([2, 4, 8])), dropped=(decode(4),))
    assert table.dispatch(decode(3)).key == decode(8)
    assert table.dispatch(decode(9)).reason is Reason.ABOVE_LADDER


def test_the_padding_guard_and_its_floor() -> None:
    table = dispatcher(BOTH, rows=16, tokens=256)
    assert table.dispatch(mixed(1, 1)).key == relaxed(4)  # four times, but small
    assert table.dispatch(mixed(17, 1)).key == relaxed(64)  # at the floor
    over = table.dispatch(mixed(127, 1))
    assert (over.mode, over.reason, over.key) == (Mode.EAGER, Reason.OVER_PADDED, mixed(127, 1))
    assert "127 tokens would be padded to 256, more than 2 times" in over.detail
    assert table.dispatch(mixed(128, 1)).key == relaxed(256)


def test_request_slots_bound_a_mixed_batch() -> None:
    config = GraphConfig(prefill=PrefillPhase(Backend.FULL, Ladder.explicit([64]), max_requests=4))
    table = dispatcher(config)
    assert table.dispatch(mixed(60, 4)).mode is Mode.FULL
    many = table.dispatch(mixed(60, 5))
    assert (many.mode, many.reason) == (Mode.EAGER, Reason.TOO_MANY_REQUESTS) and "4 request slots" in many.detail


def test_loras_are_rounded_up_to_a_captured_case() -> None:
    config = GraphConfig(DecodePhase(Backend.FULL, Ladder.explicit([4])), lora_cases=(0, 2, 8))
    table = dispatcher(config)
    keys = [table.dispatch(decode(3, 1, loras)).key for loras in (0, 1, 2, 3, 8)]
    assert [key.num_loras for key in keys] == [0, 2, 2, 8, 8]
    assert table.dispatch(decode(3, 1, 9)).reason is Reason.TOO_MANY_LORAS


def test_a_query_length_without_keys_takes_the_relaxed_one_or_runs_eagerly() -> None:
    alone = dispatcher(decode_only(Ladder.vllm(16))).dispatch(decode(4, query_len=2))
    assert (alone.mode, alone.reason) == (Mode.EAGER, Reason.NO_SUCH_KEY) and "decode.query_lens" in alone.detail
    beside = dispatcher(BOTH, 16, 256).dispatch(decode(4, query_len=2))
    assert (beside.mode, beside.key, beside.reason) == (Mode.BREAKABLE, relaxed(16), Reason.RELAXED)
    assert (beside.real, beside.padded) == (8, 16)


def test_above_both_ladders_the_full_keys_miss_is_named() -> None:
    config = GraphConfig(BOTH.decode, PrefillPhase(Backend.FULL, Ladder.explicit([8])))
    assert "17 requests; the largest size of the ladder is 16" in dispatcher(config).dispatch(decode(17)).detail


def test_no_graphs() -> None:
    off = Dispatcher(GraphConfig(), 8, {}).dispatch(decode(4))
    assert (off.mode, off.reason, off.padded) == (Mode.EAGER, Reason.DISABLED, 4)
    before = Dispatcher(BOTH, 8, {}).dispatch(decode(4))
    assert (before.reason, before.detail) == (Reason.NO_SUCH_KEY, "nothing is captured yet; call capture()")
    assert dispatcher(decode_only(Ladder.vllm(16))).dispatch(mixed(4, 1)).reason is Reason.DISABLED


def test_a_key_is_no_batch() -> None:
    with pytest.raises(ValueError, match="is a key"):
        dispatcher(BOTH).dispatch(relaxed(16))


def test_mixed_batches_do_not_pile_up() -> None:
    table = dispatcher(BOTH, 16, 256)
    kept = table.dispatch(decode(3))
    for tokens in range(16, MOST_PASSING):
        for rows in (1, 2):
            table.dispatch(mixed(tokens, rows))
    assert len(table._decisions) == MOST_PASSING + 1
    assert table.dispatch(decode(3)) is kept


def test_coverage_names_every_batch() -> None:
    coverage = dispatcher(decode_only(Ladder.explicit([1, 2, 8]))).coverage(10)
    assert [decision.padded for decision in coverage] == [1, 2, 8, 8, 8, 8, 8, 8, 9, 10]
    assert {decision.reason for decision in coverage[8:]} == {Reason.ABOVE_LADDER}
    coverage = dispatcher(BOTH, 16, 256).coverage_mixed(256)
    assert [decision.real for decision in coverage] == list(range(1, 257))
    assert sum(decision.mode is Mode.EAGER for decision in coverage) == 127 - 64


def test_cliffs_say_which_batches_fall_off_and_what_to_change() -> None:
    (cliff,) = cliffs(dispatcher(decode_only(Ladder.explicit([1, 96]), (1, 4)), rows=100).coverage(100))
    assert cliff == (
        "batches of 97 to 100 requests run eagerly (above_ladder): "
        "100 requests; the largest size of the ladder is 96; capture a size of at least 100"
    )
    (cliff,) = cliffs(dispatcher(BOTH, 20, 256).coverage(17))
    assert cliff.startswith("batches of 17 requests take the relaxed key (relaxed): 17 requests; the largest size")
    (cliff,) = cliffs(dispatcher(BOTH, 16, 256).coverage_mixed(256))
    assert cliff.startswith("batches of 65 to 127 tokens run eagerly (over_padded)")


def test_what_was_never_to_have_graphs_is_no_cliff() -> None:
    assert cliffs(Dispatcher(GraphConfig(), 8, {}).coverage(8)) == []
    prefill_alone = GraphConfig(prefill=PrefillPhase(Backend.FULL, Ladder.explicit([8])))
    assert cliffs(dispatcher(prefill_alone).coverage(8)) == []


@pytest.mark.parametrize("batch", [decode(13), mixed(100, 7)])
def test_a_known_batch_is_dispatched_quickly(batch: BatchDescriptor) -> None:
    table = dispatcher(BOTH, 16, 256)
    table.dispatch(batch)
    assert min(seconds_each(table, [batch] * 2000) for _ in range(20)) < 3e-6


def test_a_new_batch_is_dispatched_quickly() -> None:
    """Mixed batches of a server hardly ever come twice."""
    batches = [mixed(tokens, rows) for tokens in range(17, 257) for rows in range(1, 17)]
    assert min(seconds_each(dispatcher(BOTH, 16, 256), batches) for _ in range(20)) < 3e-6


def seconds_each(table: Dispatcher, batches: list[BatchDescriptor]) -> float:
    started = time.perf_counter()
    for batch in batches:
        table.dispatch(batch)
    return (time.perf_counter() - started) / len(batches)


def test_decisions_are_compared_by_identity() -> None:
    one, other = (Decision(decode(1), Mode.FULL, decode(1), Reason.EXACT, ()) for _ in range(2))
    assert one != other and len({one, other}) == 2
