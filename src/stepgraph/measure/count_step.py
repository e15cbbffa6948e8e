"""What one step launches, counted twice: the nodes of its graph, and the launches of an eager run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.measure.census import Census, by_kernel, census, is_added, listing, short
from stepgraph.measure.predict import AROUND, LAYER_LAUNCHES
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.measure.trace.kineto import TraceError
from stepgraph.measure.trace.launched import Launch, trace_step
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.nodes import GraphNode
from stepgraph.runtime.platforms import platform_for

MOST_ROWS = 20
"""Kernels and operators that the tables list; JSON has all nodes and launches."""

ON_THE_TAPE = (
    "Without a GPU nothing is launched: counted are the operators that the tape records of the step. A GPU runs none, "
    "one or several kernels for each."
)


@dataclass(frozen=True)
class StepCount:
    """nodes: of the step's graph. launches: of an eager step. None, and why, where one could not be had."""

    nodes: Sequence[GraphNode] | None
    launches: Sequence[Launch] | None
    why_no_nodes: str = ""
    why_no_launches: str = ""


def count_step(
    step: Callable[[], object], device: torch.device | str, before: Callable[[], object] = lambda: None
) -> StepCount:
    """Record a step function without arguments, and trace an eager run of it; it runs a few times.

    before: puts back what a step changes; runs in front of each, and is not counted.
    """
    platform = platform_for(device)
    nodes, launches, why_no_nodes, why_no_launches = None, None, "", ""
    with torch.inference_mode():
        before()
        platform.warm_up(step)
        before()
        try:
            nodes = platform.record(step, platform.new_pool())[0].nodes()
        except CaptureError as error:
            why_no_nodes = str(error)
        try:
            launches = trace_step(step, before)
        except TraceError as error:
            why_no_launches = str(error)
    return StepCount(nodes, launches, why_no_nodes, why_no_launches)


def census_result(counted: StepCount, what: str, device: str) -> Result:
    """Figures, tables by operation and by kernel, and every node. what: names the step."""
    in_graph = None if counted.nodes is None else census(counted.nodes)
    eager = None if counted.launches is None else census(counted.launches)
    notes = [ON_THE_TAPE] if device == "cpu" else []
    if counted.why_no_nodes:
        notes.append(f"No graph: {counted.why_no_nodes}")
    if counted.why_no_launches and device != "cpu":
        notes.append(f"No eager launches: {counted.why_no_launches}")
    more: dict[str, Any] = {}
    if in_graph is not None and counted.nodes is not None:
        more = {"graph": in_graph.to_json(), "nodes": listing(counted.nodes)}
    if eager is not None and counted.launches is not None:
        more |= {"eager": eager.to_json(), "launches": _launches(counted.launches)}
    return Result(
        name="census",
        definition=f"Launches of {what}, counted on {device}.",
        figures=[*_figures(in_graph, "graph"), *_figures(eager, "eager"), *_usual(in_graph or eager)],
        tables=[_by_operation(in_graph, eager), *_by_kernel(counted), *_by_operator(counted)],
        notes=notes,
        more=more,
    )


def _figures(found: Census | None, where: str) -> list[Figure]:
    if found is None:
        return []
    unit = "nodes" if where == "graph" else "launches"
    source = "the recorded graph" if where == "graph" else "an eager run, from the profiler's trace"
    added = (
        "launched by cuBLAS or attention beside the operation itself: sums of split-K parts, combined parts, memsets"
    )
    kinds = ", ".join(f"{number} of type {kind}" for kind, number in found.types.items())
    figures = [
        Figure.of(f"{where}: all", found.total, unit, f"everything in {source}: {kinds}"),
        Figure.of(f"{where}: own", found.own, unit, f"of {source}, without what libraries add"),
        Figure.of(f"{where}: added", sum(found.added.values()), unit, added),
    ]
    if found.layers:
        figures.append(Figure(f"{where}: own, a layer", unit, "of the own ones; a sample a layer", found.layers))
    return figures


def _usual(found: Census | None) -> list[Figure]:
    if found is None or not found.layers:
        return []
    definition = (
        f"{LAYER_LAUNCHES} a layer and {len(AROUND)} around them, without what libraries add: what is usually counted "
        f"for a decode step on one device (330 for 32 layers). Own launches on a GPU compare with it."
    )
    return [Figure.of("usually counted", found.usual, "launches", definition)]


def _by_operation(in_graph: Census | None, eager: Census | None) -> Rows:
    """Operations of all layers together, then what is around the layers."""
    found = {title: one for title, one in (("graph", in_graph), ("eager", eager)) if one is not None}
    around = dict.fromkeys(name for one in found.values() for name in one.around)
    layers = dict.fromkeys(name for one in found.values() for name in [*one.operations, *one.added])
    own_layers = {name for one in found.values() for name in one.operations}
    layers = {name: None for name in layers if name in own_layers or name not in around}
    rows: list[list[Any]] = []
    for where, names in (("layers", layers), ("around", around)):
        for name in names:
            row: list[Any] = [name, where]
            for one in found.values():
                own = one.operations if where == "layers" else one.around
                # The LM head's are the only ones around the layers.
                added = one.added.get(name, 0) if where == "layers" or name not in layers else 0
                row += [own.get(name, 0), added]
            rows.append(row)
    columns = ["operation", "where"]
    definitions = {
        "operation": "the region that launched it, the same in all layers",
        "where": "layers: the sum over all layers; around: outside of them",
    }
    for title in found:
        columns += [title, f"{title}, added"]
        definitions[title] = "nodes of the recorded graph" if title == "graph" else "launches of an eager run"
    return Rows("by operation", columns, rows, definitions)


def _by_kernel(counted: StepCount) -> list[Rows]:
    found = counted.nodes if counted.nodes is not None else counted.launches
    if found is None:
        return []
    rows = [[kind, name, times, "yes" if added else ""] for (kind, name, added), times in by_kernel(found).items()]
    columns = ["type", "kernel", "times", "added by a library"]
    source = "the recorded graph" if counted.nodes is not None else "an eager run"
    definitions = {"times": f"how often {source} launches it"}
    return [Rows("by kernel, the most frequent first", columns, _most(rows), definitions)]


def _by_operator(counted: StepCount) -> list[Rows]:
    if counted.launches is None:
        return []
    found = Counter((launch.operator, launch.type) for launch in counted.launches)
    rows = [[operator or "none of torch's", kind, times] for (operator, kind), times in found.most_common()]
    definitions = {"operator": "the outermost of torch's around the launching call; Triton's kernels have none"}
    columns = ["operator", "type", "times"]
    return [Rows("eager launches by operator", columns, _most(rows), definitions)]


def _most(rows: list[list[Any]]) -> list[list[Any]]:
    """The first MOST_ROWS rows, the rest summed up in one. Times stand in the third column."""
    rest = rows[MOST_ROWS:]
    if not rest:
        return rows
    summed = [f"{len(rest)} others", "", sum(row[2] for row in rest), *[""] * (len(rows[0]) - 3)]
    return [*rows[:MOST_ROWS], summed]


def _launches(launches: Sequence[Launch]) -> dict[str, Any]:
    """Every eager launch, for a result file."""
    columns = ["region", "operator", "type", "kernel", "added by a library"]
    rows = [[one.region, one.operator, one.type, short(one.name), is_added(one)] for one in launches]
    return {"columns": columns, "rows": rows}
