"""From traced pieces to compiled ones. Pieces that do the same share one compilation, as the layers of a model do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from stepgraph.runtime.compiler.overlap import join_overlapping
from stepgraph.runtime.compiler.pieces import Layout, TracedPiece
from stepgraph.runtime.errors import CaptureError

Compiled = Callable[..., Sequence[torch.Tensor]]


class PieceCompiler:
    """Compiles pieces with a backend of torch's compiler, by its name.

    pieces: how many it was given. compiled: how many of them were not the same as an earlier one. seconds: in all.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.pieces = self.compiled = 0
        self.seconds = 0.0
        self._known: dict[Any, Compiled] = {}

    def compile(self, piece: TracedPiece) -> Compiled:
        """The piece as a function of its inputs; returns its outputs.

        Raises:
            CaptureError: the compiler refuses it; says why.
            torch.OutOfMemoryError: no room.
        """
        self.pieces += 1
        join_overlapping(piece)
        outputs = tuple(node for node, _ in piece.outputs)
        piece.graph.output(outputs)
        key = (piece.graph.python_code("self").src, tuple(_described(layout) for layout in piece.layouts))
        if key not in self._known:
            started = time.perf_counter()
            self._known[key] = self._compile(piece)
            self.seconds += time.perf_counter() - started
            self.compiled += 1
        return self._known[key]

    def _compile(self, piece: TracedPiece) -> Compiled:
        from torch._dynamo import lookup_backend  # takes seconds

        if self.backend == "inductor":
            _use_plain_linears(piece)
        module = GraphModule(torch.nn.Module(), piece.graph)
        try:
            with torch.no_grad(), no_graphs_of_its_own():
                function: Compiled = lookup_backend(self.backend)(module, _examples(piece.layouts))
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise CaptureError(f"{self.backend} does not compile a piece: {type(error).__name__}: {first}") from error
        return function


def _use_plain_linears(piece: TracedPiece) -> None:
    """Inductor takes oneDNN's linear with constant weights only, and chooses it by itself where it pays."""
    for node in piece.graph.nodes:
        if node.op == "call_function" and str(node.target) == "mkldnn._linear_pointwise.default":
            node.target, node.args = torch.ops.aten.linear.default, node.args[:3]


def no_graphs_of_its_own() -> AbstractContextManager[Any]:
    """Inductor must wrap no piece into CUDA graphs of its own, whatever its configuration says: they are ours.

    By its policy where torch has that (2.12 and later), else by its setting.
    """
    from torch._inductor import config, cudagraph_utils

    policy = getattr(cudagraph_utils, "CUDAGraphPolicy", None)
    if not hasattr(policy, "should_wrap") or not hasattr(config, "cudagraph_policy"):
        return config.patch({"triton.cudagraphs": False})  # type: ignore[no-any-return]

    class Ours(policy):  # type: ignore[misc, valid-type]
        def should_wrap(self, compiled_graph: object) -> bool:
            return False

    return config.patch(cudagraph_policy=Ours())  # type: ignore[no-any-return]


def _described(layout: Layout) -> tuple[Any, ...]:
    """What a compilation depends on."""
    return layout.size, layout.stride, layout.dtype, layout.device, layout.residue


def _examples(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Fake inputs, each in a storage of its own and aligned like the real one."""
    examples: list[torch.Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for layout in layouts:
            itemsize = layout.dtype.itemsize
            offset, room = layout.residue // itemsize, (layout.stop - layout.start) // itemsize
            base = torch.empty(offset + room, dtype=layout.dtype, device=layout.device)
            examples.append(base.as_strided(layout.size, layout.stride, offset))
    return examples
