"""Counts what one step launches: by layer and operation, and what libraries add beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepgraph.measure.predict import AROUND, LAYER_LAUNCHES
from stepgraph.runtime.nodes import GraphNode

# Beside the matrix product, cuBLAS may launch the sum of its split-K parts (splitKreduce_kernel) and clear a workspace;
# an attention backend may combine the parts of a split KV.
_ADDED = re.compile("splitk_?reduce|combine", re.IGNORECASE)
_EVENTS = ("event_record", "wait_event")  # of NCCL, one with each of its kernels


class Launched(Protocol):
    """A node of a graph, or a launch of an eager step. region: as `GraphNode` has it."""

    @property
    def type(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def region(self) -> str: ...


def is_added(node: Launched) -> bool:
    """Whether a library launches this beside the operation that its region is named for."""
    if node.type in _EVENTS:
        return True
    in_model = node.region.startswith("layers.") or node.region == "lm_head"
    return in_model and (node.type == "memset" or _ADDED.search(short(node.name)) is not None)


def short(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    kept, depth = [], 0
    for character in name.replace("(anonymous namespace)::", ""):
        depth -= character == ">"
        if not depth and character == "(":
            break
        if not depth and character not in "<>":
            kept.append(character)
        depth += character == "<"
    return "".join(kept).split(" ")[-1]


@dataclass(frozen=True)
class Census:
    """One step.

    layers: own launches of each layer, the layers in order. operations: of those, by operation, of all layers.
    around: own launches of each other region. added: of libraries, by operation. types: all of them by type.
    """

    layers: tuple[int, ...]
    operations: dict[str, int]
    around: dict[str, int]
    added: dict[str, int]
    types: dict[str, int]

    @property
    def own(self) -> int:
        return sum(self.layers) + sum(self.around.values())

    @property
    def total(self) -> int:
        return self.own + sum(self.added.values())

    @property
    def launches(self) -> int:
        """What the host launches where there is no graph: all but events."""
        return self.total - sum(self.types.get(type, 0) for type in _EVENTS)

    @property
    def usual(self) -> int:
        """What is usually counted for so many layers, without what libraries add."""
        return LAYER_LAUNCHES * len(self.layers) + len(AROUND)

    def to_json(self) -> dict[str, Any]:
        return {
            "own a layer": sorted(set(self.layers)),
            "layers": len(self.layers),
            "operations": self.operations,
            "around": self.around,
            "added by libraries": self.added,
            "types": self.types,
            "own": self.own,
            "total": self.total,
        }


def census(nodes: Sequence[Launched]) -> Census:
    """nodes: of one step. Those of a layer have the region `layers.N/operation`."""
    layers: Counter[int] = Counter()
    operations: Counter[str] = Counter()
    around: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for node in nodes:
        top, _, operation = node.region.partition("/")
        if is_added(node):
            added[operation or top] += 1
        elif top.startswith("layers."):
            layers[int(top.removeprefix("layers."))] += 1
            operations[operation or "no operation of its own"] += 1
        else:
            around[node.region or "outside all regions"] += 1
    types = Counter(node.type for node in nodes)
    return Census(tuple(layers[i] for i in sorted(layers)), dict(operations), dict(around), dict(added), dict(types))


def by_kernel(nodes: Sequence[Launched]) -> dict[tuple[str, str, bool], int]:
    """How often each (type, short kernel name, whether a library adds it) is launched, the most frequent first."""
    return dict(Counter((node.type, short(node.name), is_added(node)) for node in nodes).most_common())


def listing(nodes: Sequence[GraphNode]) -> dict[str, Any]:
    """Every node, for a result file: rows under `columns`, and the kernels' full names once."""
    columns = ["index", "region", "type", "kernel", "grid", "block", "shared bytes", "added by a library", "after"]
    rows = []
    for n in nodes:
        after = [d.node for d in n.after]
        rows.append([n.index, n.region, n.type, short(n.name), n.grid, n.block, n.shared_bytes, is_added(n), after])
    return {"columns": columns, "rows": rows, "names": {short(n.name): n.name for n in nodes if n.name}}
