from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import Backend, BatchDescriptor, Dispatcher, GraphConfig, Ladder, Stats
from stepgraph.runtime.config import DecodePhase, PrefillPhase
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.stats import MOST_DECISIONS

CONFIG = GraphConfig(
    DecodePhase(Backend.FULL, Ladder.vllm(16), (1, 4)), PrefillPhase(Backend.BREAKABLE, Ladder.explicit([16, 256]))
)
decode, mixed = BatchDescriptor.decode, BatchDescriptor.mixed


def dispatcher() -> Dispatcher:
    return Dispatcher(CONFIG, 32, capture_keys(CONFIG, max_requests=32, max_tokens=256))


def test_counts_rows_modes_and_reasons() -> None:
    table, stats = dispatcher(), Stats()
    for batch, times in ((decode(13), 5), (decode(16), 2), (decode(20), 1), (decode(3, 4), 1), (mixed(100, 3), 1)):
        for _ in range(times):
            stats.record(table.dispatch(batch))
    assert (stats.steps, stats.real_rows) == (10, 5 * 13 + 2 * 16 + 20 + 12 + 100)
    assert stats.padded_rows == 5 * 3 + 4
    assert stats.by_mode() == {"FULL": 8, "EAGER": 2}
    assert stats.by_reason() == {"padded": 6, "exact": 2, "above_ladder": 1, "over_padded": 1}
    assert stats.as_dict()["routes"] == stats.routes()
    assert 'stepgraph_steps_total{mode="FULL",reason="padded"} 6' in stats.to_prometheus().splitlines()


def test_a_route_says_which_kind_of_batch_took_it() -> None:
    table, stats = dispatcher(), Stats()
    for batch in (decode(12), decode(3, 4), mixed(12, 3), decode(6, 2)):
        stats.record(table.dispatch(batch))
    rows = [tuple(route.values()) for route in stats.routes()]
    assert list(stats.routes()[0]) == ["kind", "query_len", "real", "padded", "mode", "reason", "steps"]
    assert rows == [
        ("mixed", 0, 12, 16, "BREAKABLE", "padded", 1),
        ("uniform", 1, 12, 16, "FULL", "padded", 1),
        ("uniform", 2, 12, 16, "BREAKABLE", "relaxed", 1),
        ("uniform", 4, 12, 16, "FULL", "padded", 1),
    ]


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 5), st.booleans())))
def test_tables_sum_to_the_number_of_steps(batches: list[tuple[int, int, bool]]) -> None:
    table, stats = dispatcher(), Stats()
    for rows, more, uniform in batches:
        stats.record(table.dispatch(decode(rows, more + 1) if uniform else mixed(rows + more, rows)))
    routes = stats.routes()
    assert stats.steps == len(batches) == sum(stats.by_mode().values()) == sum(stats.by_reason().values())
    assert sum(int(route["steps"]) for route in routes) == len(batches)
    assert sum(int(route["real"]) * int(route["steps"]) for route in routes) == stats.real_rows


def test_the_same_route_from_two_captures_is_one_row() -> None:
    stats = Stats()
    for _ in range(2):
        stats.record(dispatcher().dispatch(decode(3)))
    assert [route["steps"] for route in stats.routes()] == [2]


def test_memory_does_not_grow_with_steps() -> None:
    table, stats = dispatcher(), Stats()
    total = 0
    for _ in range(3):
        for tokens in range(32, 257):
            for rows in range(1, 20):
                stats.record(table.dispatch(mixed(tokens, rows)))
                total += 1
                assert len(stats._recent) <= MOST_DECISIONS
    assert stats.steps == total and len(stats.routes()) == 225
