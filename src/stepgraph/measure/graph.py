"""A call as a CUDA graph, to time it without the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CallGraph:
    """Captured once the call has run on a stream of its own, which compiles its kernels. warm: runs then in its place.

    A CUDA graph keeps nothing alive; this keeps the call, and so all that it holds.
    """

    def __init__(self, call: Callable[[], object], *, warm: Callable[[], object] | None = None) -> None:
        self._call = call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            (warm or call)()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            call()

    def replay(self) -> None:
        self._graph.replay()
