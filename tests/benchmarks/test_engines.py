"""The engines of the benchmarks of a GPU, on a CPU: that they are made and step, whatever that takes."""

import pytest
from engine.tiny import tiny_model

from stepgraph.engine.params import SamplingParams


def test_one_row_with_penalties(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    unfused = benchmark("h200_unfused")
    for name, value in (("MAX_LEN", 64), ("CONTEXT", 48)):
        monkeypatch.setattr(unfused, name, value)
    row = unfused.OneRow(tiny_model(), SamplingParams(temperature=0.8, repetition_penalty=1.2), "fused")
    assert int(row.buffers["seen"][0].sum()) > 0
    for runner in (row.graph, row.eager):
        assert 0 <= row.token(runner) < row.core.model.config.vocab_size


def test_rows_with_adapters(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")  # of the launches, which are measured beside
    lora = benchmark("h200_lora")
    for name, value in (("MAX_LEN", 64), ("CONTEXT", 48)):
        monkeypatch.setattr(lora, name, value)
    batch = lora.Batch(tiny_model())
    for adapters in lora.BATCHES.values():
        batch.set(adapters)
    assert batch.core.runner.stats.steps == 1 + len(lora.BATCHES)


def test_steady_rows(benchmark) -> None:
    steady = benchmark("steady")
    engine = steady.SteadyEngine(tiny_model(), 3, 8, 150)
    engine.loop_ms(4)
    engine.bare_step()
    engine.rewind(1)
    assert len(engine.host_us(40)) == 40
    many = steady.SteadyEngine(tiny_model(), 3, 8, 150, 24)
    assert len(many.many_us(4)) == 4 and not many.core._loops.impossible
