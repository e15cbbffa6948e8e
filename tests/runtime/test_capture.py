"""The capture session: order, progress, garbage collection, and sizes that fail."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stepgraph.runtime import (
    Backend,
    BatchDescriptor,
    CaptureError,
    GraphConfig,
    GraphRunner,
    Ladder,
    Mode,
    PaddingPolicy,
    PrefillPhase,
    Reason,
    Slot,
    StaticBuffers,
)


def runner_of(step, sizes=(1, 2, 4, 8), device="cpu", **config) -> GraphRunner:
    buffers = StaticBuffers(
        max_requests=8, device=device, slots=[Slot("x", torch.int64, "request", PaddingPolicy.ZERO)]
    )
    return GraphRunner(step, buffers, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit(sizes), **config))


def test_largest_first_each_warmed_up(device) -> None:
    seen = []
    runner_of(lambda x: seen.append(len(x)) or x + 1, device=device, warmups=2).capture()
    assert seen == [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]


def test_progress_counts_to_the_end() -> None:
    told = []
    runner_of(lambda x: x + 1).capture(lambda *report: told.append(report))
    assert [done for done, _, _ in told] == [0, 0, 1, 2, 3, 4] and {total for _, total, _ in told} == {4}


def test_no_garbage_collection_while_recording() -> None:
    """Rule 11."""
    states = []
    runner_of(lambda x: states.append(gc.isenabled()) or x + 1).capture()
    assert not any(states) and gc.isenabled()


def test_garbage_collection_comes_back_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        runner_of(lambda x: 1 // 0).capture()
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("lost", [1, 4, 8])
def test_a_size_out_of_memory_is_dropped_and_the_others_serve(lost: int, device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) == lost:
            raise torch.OutOfMemoryError("asked for too much")
        return x + 1

    runner = runner_of(step, device=device)
    report = runner.capture()
    assert list(report.dropped) == [BatchDescriptor.decode(lost)]
    advice = {1: "capture fewer decode sizes", 4: "end the decode ladder at 2 requests", 8: "ladder at 4 requests"}[
        lost
    ]
    why = report.dropped[BatchDescriptor.decode(lost)]
    assert "out of memory while capturing" in why and advice in why and "KV cache" in why
    routes = {decision.real: decision for decision in runner.coverage()}
    assert routes[lost].mode is (Mode.EAGER if lost == 8 else Mode.FULL)
    if lost == 8:
        assert routes[5].reason is Reason.SIZE_DROPPED
    assert runner(x=[5, 6]).output.tolist() == [6, 7]


def test_nothing_captured_says_why() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("asked for too much")

    with pytest.raises(
        CaptureError, match="not one size .* 1 request: out of memory while capturing 1 request; capture fewer decode"
    ):
        runner_of(step).capture()


def test_a_step_that_reads_the_host_is_refused_by_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    with pytest.raises(CaptureError, match=r"Tensor.item\(\) .* test_capture.py:\d+ in step"):
        runner_of(step).capture()


def test_capturing_twice_needs_a_release() -> None:
    runner = runner_of(lambda x: x + 1)
    runner.capture()
    with pytest.raises(CaptureError, match="release"):
        runner.capture()
    runner.release()
    assert runner(x=[1]).mode is Mode.EAGER
    runner.capture()
    assert runner(x=[1]).mode is Mode.FULL


def test_a_size_whose_output_changes_shape_is_dropped() -> None:
    report = runner_of(lambda x: torch.zeros(len(x), 2 if len(x) > 4 else 3)).capture()
    assert list(report.graphs) == [BatchDescriptor.decode(8)]
    assert "rows must keep their shape" in report.dropped[BatchDescriptor.decode(4)]


def test_keys_are_the_ladders_sizes() -> None:
    report = runner_of(lambda x: x + 1).capture()
    assert list(report.graphs) == [BatchDescriptor.decode(size) for size in (8, 4, 2, 1)]
    assert all(graph.seconds > 0 for graph in report.graphs.values())


def test_without_warm_ups_only_those_that_need_one_have_it(device) -> None:
    """The first of its kind, and a size whose kernel would be compiled inside the capture."""
    ran, compiled = [], {8, 4, 1}

    def step(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(x))
        recording = torch.cuda.is_current_stream_capturing() if x.is_cuda else _get_current_dispatch_mode() is not None
        if len(x) not in compiled:
            if recording:
                raise CaptureError("compiles inside a capture")
            compiled.add(len(x))
        return x + 1

    runner = runner_of(step, device=device, warmups=0)
    assert runner.capture().dropped == {}
    assert ran == [8, 8, 4, 2, 2, 2, 1]
    assert [int(runner(x=[7] * rows).output[0]) for rows in (1, 2, 3)] == [8] * 3


def test_a_size_that_is_always_the_same_is_not_cut_where_one_key_has_as_many_rows(device, caplog) -> None:
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"stat": torch.stack([x.sum(), x.max(), x.min(), x[0]]), "rows": x + 1, "sum": x.sum()}

    runner = runner_of(step, (4,), device)
    runner.capture()
    out = runner(x=[5, 6])
    assert out.stat.tolist() == [11, 6, 0, 5] and out.rows.tolist() == [6, 7] and out.sum.item() == 11
    assert not [record for record in caplog.records if "does not run" in record.message]


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_at_a_key_of_tokens(size: int, device) -> None:
    slots = [
        Slot("x", torch.int64, "token", PaddingPolicy.ZERO),
        Slot("r", torch.int64, "request", PaddingPolicy.ZERO),
    ]
    buffers = StaticBuffers(max_requests=8, device=device, slots=slots)
    config = GraphConfig(prefill=PrefillPhase(Backend.FULL, Ladder.explicit([size])))

    def step(x: torch.Tensor, r: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"stat": x.sum().expand(size) + 0, "rows": x + 1, "requests": r + 1}

    runner = GraphRunner(step, buffers, config)
    runner.capture()
    for tokens in range(1, size + 1):
        out = runner(x=range(tokens), r=[7], num_tokens=tokens)
        assert out.mode is Mode.FULL and out.stat.tolist() == [sum(range(tokens))] * size
        assert out.rows.tolist() == list(range(1, tokens + 1)) and out.requests.tolist() == [8]


def test_a_step_for_one_size_need_not_run_at_another(device, caplog) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2).flip(0).flatten()

    runner = runner_of(step, (4,), device)
    runner.capture()
    assert runner(x=[1, 2, 3]).output.tolist() == [3, 0, 1]
    assert "the step does not run at one request" in caplog.text


def test_a_key_with_outputs_of_other_names_is_dropped(device) -> None:
    runner = runner_of(lambda x: x + 1 if len(x) > 2 else {"z": x}, (2, 4), device)
    report = runner.capture()
    assert [key.num_reqs for key in report.graphs] == [4]
    assert "outputs z at 2 tokens" in report.dropped[BatchDescriptor.decode(2)]
