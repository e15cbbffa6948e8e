"""What a step must read and compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepgraph.engine.random_model import SHAPES
from stepgraph.measure.work import Floor, Limits, Part, decode_work, floor, weight_bytes

LLAMA = SHAPES["llama-3-8b"]


def test_a_tied_embedding_is_read_as_the_lm_head() -> None:
    assert weight_bytes(LLAMA, 2) == 15_009_849_344
    assert weight_bytes(SHAPES["llama-3.2-1b"], 2) == 2_471_628_800


def test_work_grows_with_rows_and_context() -> None:
    weights, attention = decode_work(LLAMA, rows=16, context=512, itemsize=2)
    assert weights.nbytes == weight_bytes(LLAMA, 2)
    assert weights.flops == pytest.approx(2 * 16 * 7.5e9, rel=0.01)
    assert attention.nbytes == 16 * 512 * 128 * 1024
    assert attention.flops == 4 * 16 * 512 * 32 * 4096


def test_a_window_cuts_the_context() -> None:
    cut = decode_work(replace(LLAMA, window=100), rows=1, context=512, itemsize=2)
    assert cut == decode_work(LLAMA, rows=1, context=100, itemsize=2)


def test_each_part_is_bound_by_whichever_takes_longer() -> None:
    parts = [Part("weights", 2_000_000, 30), Part("attention", 1_000_000, 5)]
    assert floor(parts, Limits(read=1e12, compute=1e7)) == Floor(
        read=pytest.approx(3), compute=pytest.approx(3.5), total=pytest.approx(4), bound_by_compute=pytest.approx(3)
    )
