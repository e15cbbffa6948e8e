"""Which algorithm sums a message, and why. Pure: what is asked about the device and the stream comes in as facts.

Captured and eager messages have thresholds of their own. Under capture an input's address is fixed, so the pull family
may read it where it lies, through a row of a pointer table that is filled after the capture; eagerly it is copied into
symmetric memory first. Push never touches that memory, so it gains nothing from capture, and the crossover moves.
The order in which thresholds are asked is SGLang's (custom all-reduce v2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stepgraph.comm.errors import CommError
from stepgraph.comm.thresholds import Table


class Algorithm(StrEnum):
    PUSH = "one_shot_push"
    PULL = "one_shot_pull"
    TWO_SHOT = "two_shot_pull"
    MULTICAST = "two_shot_multicast"
    LIBRARY = "library"  # NCCL on GPUs, gloo on CPUs


class Source(StrEnum):
    """Where peers find a rank's contribution."""

    PUSHED = "pushed"  # the rank writes it into its peers' slots
    STAGED = "staged"  # copied into symmetric memory
    ROW = "pointer row"  # where it lies: zero copy
    OWN = "own"  # the library's business


@dataclass(frozen=True)
class Choice:
    """How one message is summed, and why.

    Raises:
        CommError: a row of the pointer table for push, which has nothing to read there.
    """

    algorithm: Algorithm
    source: Source
    reason: str

    def __post_init__(self) -> None:
        if self.algorithm is Algorithm.PUSH and self.source is Source.ROW:
            raise CommError("push never takes a row of the pointer table: it writes to its peers")


@dataclass(frozen=True)
class Facts:
    """What the choice depends on besides the size.

    capturing: whether the stream is really capturing, which it is not in a warm-up.
    no_kernels: why our kernels cannot run; no_rows: why no address can be exchanged after the capture (several nodes,
    piecewise graphs, an allocator that exports nothing); no_multicast: why that is off. None: nothing is in the way.
    push_bytes, stage_bytes: what a push slot and the staging buffer hold.
    """

    capturing: bool
    no_kernels: str | None = None
    no_rows: str | None = None
    no_multicast: str | None = "switched off"
    push_bytes: int = 0
    stage_bytes: int = 0


def choose(table: Table, nbytes: int, facts: Facts) -> Choice:
    """Which algorithm and source for a message of so many bytes."""
    if facts.no_kernels is not None:
        return Choice(Algorithm.LIBRARY, Source.OWN, facts.no_kernels)
    rows = facts.capturing and facts.no_rows is None
    limits = table.captured if rows else table.eager
    which = "captured" if rows else "eager"
    note = f"; captured, but without pointer rows: {facts.no_rows}" if facts.capturing and not rows else ""
    full = ""
    if nbytes <= limits.push:
        if nbytes <= facts.push_bytes:
            return Choice(Algorithm.PUSH, Source.PUSHED, f"{which}: at most {limits.push} bytes{note}")
        full = f"; a push slot holds {facts.push_bytes} bytes"
    pulled = Source.ROW if rows else Source.STAGED
    fits = rows or nbytes <= facts.stage_bytes
    if nbytes <= limits.pull and fits:
        return Choice(Algorithm.PULL, pulled, f"{which}: at most {limits.pull} bytes{full}{note}")
    if limits.multicast is not None and limits.multicast[0] <= nbytes <= limits.multicast[1]:
        if facts.no_multicast is None and nbytes <= facts.stage_bytes:
            low, high = limits.multicast
            return Choice(Algorithm.MULTICAST, Source.STAGED, f"{which}: {low} to {high} bytes{full}{note}")
        full += f"; multicast would be next, and is refused: {facts.no_multicast}"
    if nbytes <= limits.two_shot and fits:
        return Choice(Algorithm.TWO_SHOT, pulled, f"{which}: at most {limits.two_shot} bytes{full}{note}")
    if nbytes <= limits.two_shot:
        full += f"; the staging buffer holds {facts.stage_bytes} bytes"
    return Choice(Algorithm.LIBRARY, Source.OWN, f"{which}: above {limits.two_shot} bytes{full}{note}")
