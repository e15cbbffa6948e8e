"""The simulator of continuous batching, against one that goes step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.ladder_cases import AZURE, straight

from stepgraph.measure.ladder_fit.requests import Requests, read_azure
from stepgraph.measure.ladder_fit.server import Server
from stepgraph.measure.ladder_fit.simulate import Prefill, simulate
from stepgraph.runtime.ladder import Ladder


def requests(*rows: tuple[int, int, int]) -> Requests:
    """(arrival in ns, tokens of the prompt, tokens of the answer)."""
    return Requests(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def step_by_step(given: Requests, step_ns: list[int], prefill: Prefill | None) -> list[int]:
    """Steps by rows: every step on its own, every request an object."""
    coming = [
        [int(a), int(p), int(d)] for a, p, d in zip(given.arrival_ns, given.prompt, given.decode_tokens, strict=True)
    ]
    rows: list[int] = []  # tokens left of each
    filling: list[list[int]] = []
    counts, now = [0] * len(step_ns), 0
    while coming or rows or filling:
        if not rows and not filling:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now and len(rows) + len(filling) < len(step_ns) - 1:
            _, prompt, decode = coming.pop(0)
            if prefill is not None:
                filling.append([prompt, decode])
            elif decode:
                rows.append(decode)
        if not rows and not filling:
            continue
        computed = 0
        done = []
        while prefill is not None and filling and computed < prefill.chunk:
            part = min(filling[0][0], prefill.chunk - computed)
            filling[0][0] -= part
            computed += part
            if not filling[0][0]:
                done.append(filling.pop(0)[1])
        now += (step_ns[len(rows)] if rows else 0) + computed * (prefill.ns_a_token if prefill else 0)
        counts[len(rows)] += 1 if rows else 0
        rows = [left - 1 for left in rows if left > 1] + [left for left in done if left]
    return counts


rows_of = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=12)


@given(rows_of, st.integers(1, 5), st.sampled_from([None, Prefill(3, 4), Prefill(10, 1)]))
def test_as_step_by_step(rows: list[tuple[int, int, int]], most: int, prefill: Prefill | None) -> None:
    given_requests = requests(*sorted(rows))
    step_ns = [0, *(7 + 3 * size for size in range(1, most + 1))]
    expected = step_by_step(given_requests, step_ns, prefill)
    if not any(expected):
        with pytest.raises(ValueError, match="no request decodes"):
            simulate(given_requests, np.array(step_ns), prefill)
    else:
        assert simulate(given_requests, np.array(step_ns), prefill).steps.tolist() == expected


def test_by_hand() -> None:
    served = simulate(requests((0, 9, 4), (10, 9, 3)), np.array([0, 10, 12]))
    # alone for one step; both for two; both leave
    assert served.steps.tolist() == [0, 1, 2]
    assert served.ms_a_step == pytest.approx((10 + 24) / 3 / 1e6)
    assert served.ms_a_token == pytest.approx((10 + 4 * 12) / 5 / 1e6)
    assert (served.rows(0.3), served.rows(0.5), served.rows(0.99)) == (1, 2, 2)


def test_rows_are_limited() -> None:
    assert simulate(requests(*[(0, 1, 3)] * 5), np.array([0, 10, 12])).steps.tolist() == [0, 2, 4]


def test_longer_steps_gather_more_rows() -> None:
    with AZURE.open(encoding="utf-8") as file:
        trace = read_azure(file)
    server = Server(straight(64))
    exact, padded = (simulate(trace, server.step_ns(Ladder.explicit(sizes))) for sizes in (range(1, 65), (32, 64)))
    tokens = [int(one.steps @ np.arange(65)) for one in (exact, padded)]
    assert tokens == [int(trace.decode_tokens.sum())] * 2
    assert padded.steps.sum() < exact.steps.sum() and padded.rows(0.9) > exact.rows(0.9)
