"""What a recording consists of, node by node."""

from __future__ import annotations

from dataclasses import dataclass

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Dependency:
    """A node runs after another one.

    programmatic: it may start before the other has ended, and waits for it itself (programmatic dependent launch).
    """

    node: int
    programmatic: bool = False


@dataclass(frozen=True)
class GraphNode:
    """One recorded operation.

    index: its place in the recording; every node comes after those it depends on.
    type: `kernel`, `memcpy`, `memset`, `graph`, … as the driver has them, or `operator` on a tape.
    name: of the kernel or operator; "" for other types.
    region: where the step recorded it, as `layers.3/attention`; "" outside all regions.
    grid, block: blocks and threads of a kernel. shared_bytes: its dynamic shared memory a block.
    after: what it waits for. Empty on a tape, which runs in order.
    parent: the node of type `graph` that it belongs to.
    """

    index: int
    type: str
    name: str
    region: str
    grid: Extent | None = None
    block: Extent | None = None
    shared_bytes: int | None = None
    after: tuple[Dependency, ...] = ()
    parent: int | None = None
