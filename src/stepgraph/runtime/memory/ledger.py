"""Who has which bytes: graphs by family, everything that has a name, and what is left over against the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.capture import CaptureReport
from stepgraph.runtime.memory.cost import CaptureCost
from stepgraph.runtime.naming import describe
from stepgraph.runtime.platforms import DeviceMemory

FAMILIES = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
WITH_ADAPTERS = " with adapters"
"""Behind a family's name: its graphs for batches with adapters, which are rows of their own."""


@dataclass(frozen=True)
class Row:
    """Bytes with a name.

    in_torch: they come from torch's allocator. of: the row that they are part of; such a row is not added up.
    later: of bytes outside torch, how many were taken after the capture had begun.
    """

    name: str
    nbytes: int
    in_torch: bool = True
    of: str = ""
    later: int = 0


@dataclass(frozen=True)
class Captured:
    """One runner's graphs. draft: they belong to a drafter, whose families have names of their own."""

    report: CaptureReport
    draft: bool = False


@dataclass(frozen=True)
class FamilyCost:
    """What the graphs of one family took together; the fields are those of CaptureCost."""

    graphs: int
    pool_bytes: int
    driver_bytes: int
    loaded_bytes: int
    kept_bytes: int
    nodes: Mapping[str, int]
    warmup_seconds: float
    capture_seconds: float
    instantiate_seconds: float
    compile_seconds: float

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.warmup_seconds + self.capture_seconds + self.instantiate_seconds

    @classmethod
    def of(cls, costs: Sequence[CaptureCost]) -> FamilyCost:
        return cls(
            graphs=len(costs),
            pool_bytes=sum(cost.pool_bytes for cost in costs),
            driver_bytes=sum(cost.driver_bytes for cost in costs),
            loaded_bytes=sum(cost.loaded_bytes for cost in costs),
            kept_bytes=sum(cost.kept_bytes for cost in costs),
            nodes=dict(sum((Counter(cost.nodes) for cost in costs), Counter())),
            warmup_seconds=sum(cost.warmup_seconds for cost in costs),
            capture_seconds=sum(cost.capture_seconds for cost in costs),
            instantiate_seconds=sum(cost.instantiate_seconds for cost in costs),
            compile_seconds=sum(cost.compile_seconds for cost in costs),
        )


@dataclass(frozen=True)
class MemoryLedger:
    """All rows, in bytes.

    graphs: (family, key, cost) of each graph, in the order of their capture. dropped: why, by key in words.
    device: its own figures when the ledger was made; None where it has none.
    residual: of the device's figure what no row explains, tensors without a name among it; it may be negative. None
        where there is no figure.
    """

    rows: tuple[Row, ...]
    graphs: tuple[tuple[str, BatchDescriptor, CaptureCost], ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    device: DeviceMemory | None = None

    @property
    def total(self) -> int:
        return sum(row.nbytes for row in self.rows if not row.of)

    @property
    def residual(self) -> int | None:
        return None if self.device is None else self.device.total - self.device.free - self.total

    def families(self) -> dict[str, FamilyCost]:
        """By name; those without graphs are left out."""
        names = [name + kind for name in FAMILIES for kind in ("", WITH_ADAPTERS)]
        costs = {name: [cost for family, _, cost in self.graphs if family == name] for name in names}
        return {name: FamilyCost.of(some) for name, some in costs.items() if some}

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: bytes and seconds."""
        return {
            "rows": [{"name": row.name, "bytes": row.nbytes, "of": row.of or None} for row in self.rows],
            "total_bytes": self.total,
            "residual_bytes": self.residual,
            "device": None if self.device is None else asdict(self.device),
            "families": {name: asdict(family) for name, family in self.families().items()},
            "graphs": [
                {"family": family, "key": describe(key), "tokens": key.num_tokens, "requests": key.num_reqs}
                | asdict(cost)
                for family, key, cost in self.graphs
            ],
            "dropped": dict(self.dropped),
        }


def make_ledger(
    captured: Iterable[Captured],
    named: Sequence[Row] = (),
    now: DeviceMemory | None = None,
    start: DeviceMemory | None = None,
) -> MemoryLedger:
    """The ledger of everything that runners captured and of what else has a name.

    now: the device's memory as it is. start: as it was before any of the named rows; by default when the first of the
        runners began to capture, so that what was taken outside torch until then is one row.
    """
    captured = list(captured)
    graphs = tuple(
        (family(key, draft=one.draft), key, graph.cost) for one in captured for key, graph in one.report.graphs.items()
    )
    dropped = {describe(key): why for one in captured for key, why in one.report.dropped.items()}
    ledger = MemoryLedger(tuple(named), graphs, dropped)
    rows = list(named)
    for name, costs in ledger.families().items():
        rows.append(Row(f"{name} graphs: pool", costs.pool_bytes))
        if now is not None:
            rows.append(Row(f"{name} graphs: driver", costs.driver_bytes, in_torch=False, later=costs.driver_bytes))
    if now is not None:
        rows += _unnamed(rows, graphs, now, start, [one.report.before for one in captured])
    return MemoryLedger(tuple(rows), graphs, dropped, now)


def family(key: BatchDescriptor, *, draft: bool = False) -> str:
    """Of FAMILIES, with or without adapters. Uniform batches of several tokens a request verify a draft, or extend
    one."""
    kind = 0 if key.is_relaxed else 1 if key.query_len == 1 else 2
    return FAMILIES[kind + 3 * draft] + (WITH_ADAPTERS if key.num_loras else "")


def _unnamed(
    rows: Sequence[Row],
    graphs: Sequence[tuple[str, BatchDescriptor, CaptureCost]],
    now: DeviceMemory,
    start: DeviceMemory | None,
    before: Sequence[DeviceMemory | None],
) -> list[Row]:
    """What the driver holds for no one that has a name."""
    unnamed = [Row("driver: loaded by warm-ups", sum(cost.loaded_bytes for _, _, cost in graphs), in_torch=False)]
    first = next((reading for reading in before if reading is not None), None)
    start = start or first or now
    unnamed.append(Row("driver: context, and other processes", start.outside, in_torch=False))
    if first is not None:
        named = sum(row.nbytes - row.later for row in rows if not row.in_torch and not row.of)
        loaded = first.outside - start.outside - named
        unnamed.append(Row("driver: loaded before the capture", loaded, in_torch=False))
    return unnamed
