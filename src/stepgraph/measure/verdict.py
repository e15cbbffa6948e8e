"""Says in words what a step's time depends on, with the figures that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepgraph.measure.trace.waterfall import Gap
from stepgraph.measure.work import Floor

STALL_US = 100.0
"""A wait before the first kernel is a finding from here on."""
BREAK_US, BREAK_RATIO = 50.0, 3.0
"""A wait inside the step is one where it is this long, and so many times what nine tenths of the gaps stay below."""

CAVEATS = (
    "The verdict rests on time that the device was seen to idle. What launches cost the host, or would cost it, proves "
    "nothing by being longer than reading takes: that is a submission estimate against a lower bound, and kernels, "
    "attention, collectives and waits make the device's own path longer.",
    "Nor is the duration of an empty kernel a price that every kernel pays on top: gaps and overlap are as the "
    "timeline has them.",
    "The profiler makes launches dearer, so that a step bound by launching looks a little more so. Where the step was "
    "also timed without it, what it adds to the launch of a graph is a row of its own, and in no finding.",
)


class Bound(StrEnum):
    LAUNCHING = "launching"
    READING = "reading"
    ARITHMETIC = "arithmetic"
    OTHER = "something else"


@dataclass(frozen=True)
class Parts:
    """A step's time in µs, as in `StepWaterfall`, and what it is held against.

    floor: None where the work is not known. activities: kernels, copies and memsets. submitted: host time until the
    last launch. launches: calls. gaps: those that most steps have, largest first.
    """

    total: float
    before_first: float
    busy: float
    gaps_host: float
    gaps_device: float
    submitted: float
    launches: int
    activities: int
    gaps: Sequence[Gap] = ()
    floor: Floor | None = None

    @property
    def host_budget(self) -> float:
        """Device time over what it ran, µs: B_host. A host that launches each within that keeps the device busy."""
        return self.busy / self.activities

    @property
    def host_cost(self) -> float:
        """Host time until the last launch over the launches, µs."""
        return self.submitted / self.launches


@dataclass(frozen=True)
class Verdict:
    """bound: what takes the largest part of the step. because: in a sentence. findings: what else stands out."""

    bound: Bound
    because: str
    findings: tuple[str, ...]


def verdict(parts: Parts) -> Verdict:
    """What takes the largest part: waiting for the host, the floor, kernels over it, or idling between them."""
    host = parts.before_first + parts.gaps_host
    floor = 0.0 if parts.floor is None else min(parts.floor.total, parts.busy)
    largest = max(host, floor, parts.busy - floor, parts.gaps_device)
    findings = tuple(_findings(parts))
    if largest == floor and parts.floor is not None:
        bound = Bound.ARITHMETIC if 2 * parts.floor.bound_by_compute > parts.floor.total else Bound.READING
        need = "its bytes need at the read limit"
        if parts.floor.bound_by_compute:
            need = f"its bytes and its arithmetic need at the limits, {bound} the larger part of it"
        return Verdict(bound, f"{_share(floor, parts)} are what {need}", findings)
    if largest == host:
        if parts.before_first > parts.gaps_host and parts.before_first >= STALL_US:
            why = f"the device waits {_share(parts.before_first, parts)} for the host's first launch"
            return Verdict(Bound.OTHER, why, findings)
        why = (
            f"the device waits {_share(host, parts)} for the host; a launch costs the host {_us(parts.host_cost)}, "
            f"while the device has {_us(parts.host_budget)} of work in each"
        )
        return Verdict(Bound.LAUNCHING, why, findings)
    if largest == parts.gaps_device:
        return Verdict(
            Bound.OTHER, f"the device idles {_share(parts.gaps_device, parts)} between what it has been given", findings
        )
    beyond = "its work is not known, so that reading and arithmetic cannot be told apart"
    if parts.floor is not None:
        beyond = "that is beyond what bytes and arithmetic need at the limits"
    return Verdict(Bound.OTHER, f"kernels take {_share(parts.busy - floor, parts)}; {beyond}", findings)


def _findings(parts: Parts) -> list[str]:
    found = []
    if parts.before_first >= STALL_US:
        found.append(f"host stall: {_share(parts.before_first, parts)} pass before the first kernel starts")
    for gap in parts.gaps[:3]:
        if gap.us < max(BREAK_US, BREAK_RATIO * _usual(parts.gaps)):
            break
        whose = "the host had launched nothing" if gap.host else "the work was there, and waited for something else"
        where = f"after {_short(gap.after)} and before {_short(gap.before)}, activity {gap.place}"
        found.append(f"idle break: {_share(gap.us, parts)} {where}; {whose}")
    return found


def _usual(gaps: Sequence[Gap]) -> float:
    """What nine tenths of the gaps stay below, µs."""
    return gaps[len(gaps) // 10].us if len(gaps) >= 10 else 0.0


def _share(us: float, parts: Parts) -> str:
    return f"{us:,.0f} of {parts.total:,.0f} µs ({us / parts.total:.0%})"


def _us(us: float) -> str:
    return f"{us:.1f} µs"


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
