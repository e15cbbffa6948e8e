"""Captures of one thread share a stream; no two threads do."""

import threading

import pytest
import torch

from stepgraph.runtime.platforms import cuda_streams, platform_for

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_streams, "_lent", threading.local())
    monkeypatch.setattr(cuda_streams, "_idle", {})
    monkeypatch.setattr(cuda_streams, "_new", lambda device: object())


def of_thread(device: torch.device) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(cuda_streams.capture_stream(device)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("streams")
def test_a_thread_has_one_on_each_device() -> None:
    mine = cuda_streams.capture_stream(FIRST)
    assert cuda_streams.capture_stream(FIRST) is mine
    assert cuda_streams.capture_stream(SECOND) is not mine
    assert of_thread(FIRST) is not mine


@pytest.mark.usefixtures("streams")
def test_the_stream_of_a_thread_that_ended_serves_the_next() -> None:
    """Whose threads come and go would otherwise take a workspace for each."""
    assert of_thread(FIRST) is of_thread(FIRST)


@pytest.mark.gpu
def test_on_a_gpu_it_is_none_that_torch_hands_out() -> None:
    device = platform_for("cuda").device
    mine = cuda_streams.capture_stream(device)
    handed_out = {torch.cuda.Stream(device).cuda_stream for _ in range(64)} | {0}
    assert mine.cuda_stream not in handed_out and mine.device == device
    assert platform_for("cuda") is platform_for(device)
    x = torch.zeros(4, device=device)
    platform_for(device).warm_up(lambda: x.add_(1))
    assert x.tolist() == [1] * 4
