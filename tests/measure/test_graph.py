"""A call as a graph: warmed once, and alive as long as the graph is, which keeps nothing itself."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepgraph.measure.graph import CallGraph


class Held:
    """What a call reads."""


def made(calls: list[str], warm: bool) -> tuple[CallGraph, weakref.ref[Held]]:
    held = Held()

    def call() -> None:
        calls.append(f"call of {type(held).__name__}")

    return CallGraph(call, warm=(lambda: calls.append("warm")) if warm else None), weakref.ref(held)


@pytest.mark.parametrize(("warm", "wanted"), [(False, ["call of Held"] * 2), (True, ["warm", "call of Held"])])
def test_it_is_warmed_once_and_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch, warm: bool, wanted: Any) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stubs = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, stream: nullcontext(),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    calls: list[str] = []
    graph, held = made(calls, warm)
    assert calls == wanted
    gc.collect()
    assert held() is not None
    del graph
    gc.collect()
    assert held() is None


@pytest.mark.gpu
def test_replays_read_what_nobody_else_holds(device: torch.device) -> None:
    out = torch.zeros(1 << 20, device=device)

    def copying() -> CallGraph:
        x = torch.full_like(out, 3.0)
        return CallGraph(lambda: out.copy_(x))

    graph = copying()
    others = [torch.full_like(out, 7.0) for _ in range(8)]
    graph.replay()
    torch.cuda.synchronize()
    assert bool((out == 3.0).all()) and len(others) == 8
