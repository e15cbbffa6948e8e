from stepgraph.runtime import BatchDescriptor, Dispatcher, Ladder, Stats


def test_counts_rows_modes_and_reasons() -> None:
    ladder = Ladder.vllm(16)
    dispatcher = Dispatcher(ladder, [BatchDescriptor.decode(size) for size in ladder.sizes])
    stats = Stats()
    for size, times in ((13, 5), (16, 2), (20, 1)):
        for _ in range(times):
            stats.record(dispatcher.dispatch(BatchDescriptor.decode(size)))
    assert (stats.steps, stats.real_rows, stats.padded_rows) == (8, 5 * 13 + 2 * 16 + 20, 15)
    assert stats.by_mode() == {"FULL": 7, "EAGER": 1}
    assert stats.by_reason() == {"padded": 5, "exact": 2, "above_ladder": 1}
    assert {"real": 13, "padded": 16, "mode": "FULL", "reason": "padded", "steps": 5} in stats.routes()
    assert 'stepgraph_steps_total{mode="FULL",reason="padded"} 5' in stats.to_prometheus().splitlines()


def test_the_same_route_from_two_captures_is_one_row() -> None:
    stats = Stats()
    for _ in range(2):
        stats.record(Dispatcher(None, ()).dispatch(BatchDescriptor.decode(3)))
    assert [route["steps"] for route in stats.routes()] == [2]
