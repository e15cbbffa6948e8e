"""Counts the nodes of a decode step by what they are for, from the regions that were noted at its capture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.nodes import GraphNode

# Beside the matrix product, cuBLAS may launch the sum of its split-K parts (splitKreduce_kernel) and clear a workspace;
# an attention backend may combine the parts of a split KV.
_ADDED = re.compile("reduce|combine", re.IGNORECASE)


def is_added(node: GraphNode) -> bool:
    """Whether a library launches this beside the operation that its region is named for."""
    in_model = node.region.startswith("layers.") or node.region == "lm_head"
    return in_model and (node.type != "kernel" or _ADDED.search(short(node.name)) is not None)


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

    layers: own launches of each layer, the layers in order. around: of each other region. added: of libraries, by
    operation.
    """

    layers: tuple[int, ...]
    around: dict[str, int]
    added: dict[str, int]

    @property
    def own(self) -> int:
        return sum(self.layers) + sum(self.around.values())

    @property
    def total(self) -> int:
        return self.own + sum(self.added.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "own a layer": sorted(set(self.layers)),
            "layers": len(self.layers),
            "around": self.around,
            "added by libraries": self.added,
            "own": self.own,
            "total": self.total,
        }


def census(nodes: Sequence[GraphNode]) -> Census:
    layers: Counter[int] = Counter()
    around: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for node in nodes:
        top, _, operation = node.region.partition("/")
        if is_added(node):
            added[operation or top] += 1
        elif top.startswith("layers."):
            layers[int(top.removeprefix("layers."))] += 1
        else:
            around[node.region or "outside all regions"] += 1
    return Census(tuple(layers[i] for i in sorted(layers)), dict(around), dict(added))


def listing(nodes: Sequence[GraphNode]) -> dict[str, Any]:
    """Every node, for a result file: rows under `columns`, and the kernels' full names once."""
    columns = ["index", "region", "type", "kernel", "grid", "block", "shared bytes", "added by a library", "after"]
    rows = []
    for n in nodes:
        after = [d.node for d in n.after]
        rows.append([n.index, n.region, n.type, short(n.name), n.grid, n.block, n.shared_bytes, is_added(n), after])
    return {"columns": columns, "rows": rows, "names": {short(n.name): n.name for n in nodes if n.name}}
