"""Dispatch: right rung, a reason for every answer, and quick."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import BatchDescriptor, Dispatcher, Ladder, Mode, Reason


def full(ladder: Ladder, dropped: dict[int, str] | None = None) -> Dispatcher:
    left = [BatchDescriptor.decode(size) for size in ladder.sizes if size not in (dropped or {})]
    return Dispatcher(ladder, left, dropped)


def test_the_chapters_paddings() -> None:
    nine = BatchDescriptor.decode(9)
    on_sglang, on_vllm = full(Ladder.sglang(256)).dispatch(nine), full(Ladder.vllm(512)).dispatch(nine)
    assert (on_sglang.padded, (on_sglang.padded - 9) / on_sglang.padded) == (12, 0.25)
    assert (on_vllm.padded, (on_vllm.padded - 9) / on_vllm.padded) == (16, 0.4375)


def test_200_000_random_dispatches() -> None:
    rng = random.Random(0)
    ladders = [Ladder.vllm(512), Ladder.sglang(256), Ladder.sglang(512, speculative=True), Ladder.explicit([3, 50, 77])]
    tables = [(ladder, full(ladder)) for ladder in ladders]
    for _ in range(200_000):
        ladder, dispatcher = tables[rng.randrange(len(tables))]
        size = rng.randrange(1, 600)
        decision = dispatcher.dispatch(BatchDescriptor.decode(size))
        if size > ladder.max_size:
            assert (decision.mode, decision.padded, decision.reason) == (Mode.EAGER, size, Reason.ABOVE_LADDER)
        else:
            assert decision.mode is Mode.FULL and decision.padded == ladder.rung(size) and decision.real == size
            assert decision.reason is (Reason.EXACT if decision.padded == size else Reason.PADDED)


@given(st.sets(st.integers(1, 64), min_size=1), st.data())
def test_a_dropped_size_hands_its_batches_to_the_next(sizes: set[int], data: st.DataObject) -> None:
    ladder = Ladder.explicit(sizes)
    dropped = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    dispatcher = full(ladder, {size: "out of memory" for size in dropped})
    for size in range(1, ladder.max_size + 1):
        decision = dispatcher.dispatch(BatchDescriptor.decode(size))
        left = [rung for rung in sizes - dropped if rung >= size]
        assert decision.padded == (min(left) if left else size)
        assert decision.mode is (Mode.FULL if left else Mode.EAGER)
        if not left:
            assert decision.reason is Reason.SIZE_DROPPED and "out of memory" in decision.detail


def test_a_query_length_that_was_not_captured_runs_eager() -> None:
    decision = full(Ladder.vllm(16)).dispatch(BatchDescriptor.decode(4, query_len=2))
    assert (decision.mode, decision.reason) == (Mode.EAGER, Reason.NO_SUCH_KEY)


def test_no_ladder_means_disabled() -> None:
    decision = Dispatcher(None, ()).dispatch(BatchDescriptor.decode(4))
    assert (decision.mode, decision.reason, decision.padded) == (Mode.EAGER, Reason.DISABLED, 4)


def test_coverage_names_every_batch() -> None:
    coverage = full(Ladder.explicit([1, 2, 8])).coverage(10)
    assert [decision.padded for decision in coverage] == [1, 2, 8, 8, 8, 8, 8, 8, 9, 10]
    assert {decision.reason for decision in coverage[8:]} == {Reason.ABOVE_LADDER}


def test_a_dispatch_is_quick() -> None:
    dispatcher, batch = full(Ladder.vllm(512)), BatchDescriptor.decode(13)
    dispatcher.dispatch(batch)
    best = min(_seconds(dispatcher, batch) for _ in range(5))
    assert best < 20e-6  # some 1 µs on an idle machine; CI machines are not idle


def _seconds(dispatcher: Dispatcher, batch: BatchDescriptor, calls: int = 2000) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        dispatcher.dispatch(batch)
    return (time.perf_counter() - started) / calls
