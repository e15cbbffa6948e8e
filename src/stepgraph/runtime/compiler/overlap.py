"""Inputs of a piece that share bytes, which the compiler must know of where the piece writes them."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepgraph.runtime.compiler.pieces import Ref, Span, TracedPiece
from stepgraph.runtime.errors import CaptureError


def join_overlapping(piece: TracedPiece) -> None:
    """Give the piece one flat input in place of those that share bytes, and views of it in their places.

    Raises:
        CaptureError: they are of different types.
    """
    placeholders = [node for node in piece.graph.nodes if node.op == "placeholder"]
    groups = _overlapping(piece)
    for members in groups:
        layouts = [piece.layouts[index] for index in members]
        first, itemsize = layouts[0], layouts[0].dtype.itemsize
        if any(layout.dtype != first.dtype for layout in layouts):
            raise CaptureError("a piece writes memory that it also reads as another type")
        stop = max(layout.stop for layout in layouts)
        length = (stop - first.start) // itemsize
        base = placeholders[members[0]]
        for index, layout in zip(members, layouts, strict=True):
            place = (layout.size, layout.stride, (layout.start - first.start) // itemsize)
            users = list(placeholders[index].users)
            with piece.graph.inserting_after(placeholders[-1]):
                view = piece.graph.call_function(torch.ops.aten.as_strided.default, (base, *place))
            for user in users:
                user.replace_input_with(placeholders[index], view)
        source = piece.inputs[members[0]]
        if isinstance(source, torch.Tensor):
            piece.inputs[members[0]] = source.as_strided((length,), (1,))
        elif isinstance(source, Ref):
            piece.inputs[members[0]] = Span(source, length)
        piece.layouts[members[0]] = replace(first, size=(length,), stride=(1,), stop=stop)
    gone = {index for members in groups for index in members[1:]}
    for index in gone:
        piece.graph.erase_node(placeholders[index])
    piece.inputs[:] = [value for index, value in enumerate(piece.inputs) if index not in gone]
    piece.layouts[:] = [value for index, value in enumerate(piece.layouts) if index not in gone]


def _overlapping(piece: TracedPiece) -> list[list[int]]:
    """Groups of inputs in a storage that the piece writes, each sharing bytes with another of its group; the one that
    begins first is first."""
    by_storage: dict[int, list[int]] = {}
    for index, storage in enumerate(piece.storages):
        if storage in piece.written:
            by_storage.setdefault(storage, []).append(index)
    groups: list[list[int]] = []
    for members in by_storage.values():
        reach, group = -1, list[int]()
        for index in sorted(members, key=lambda index: piece.layouts[index].start):
            if piece.layouts[index].start >= reach:
                group = []
                groups.append(group)
            group.append(index)
            reach = max(reach, piece.layouts[index].stop)
    return [group for group in groups if len(group) > 1]
