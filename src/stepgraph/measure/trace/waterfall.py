"""Where the time of one traced step went. Every microsecond from its beginning to its last activity is in one part."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stepgraph.measure.trace.intervals import length, overlap, union
from stepgraph.measure.trace.kineto import Activity, Call
from stepgraph.measure.trace.steps import StepTrace


@dataclass(frozen=True, slots=True)
class Gap:
    """The device idles inside a step, µs.

    place: how many activities started before it. after: the name of the one that ended last; before: of the next.
    host: the device had run out of what the host had launched. nodes: that the graph ran whose launch it waited for;
    0 where it waited for no graph.
    """

    us: float
    place: int
    after: str
    before: str
    host: bool
    nodes: int = 0


@dataclass(frozen=True)
class StepWaterfall:
    """Times in µs; total = before_first + busy + gaps_device + gaps_host.

    total: from the step's beginning on the host to the end of its last activity.
    before_first: until the first activity starts.
    busy: the union of the activities' intervals. overlap: by how much the sum of their durations exceeds it.
    gaps: the rest, by what the device waited for; largest first.
    launches: calls that had the device do something. activities: kernels, copies and memsets.
    submitted: from the beginning to the end of the last launch.
    tklqt: activity start less the start of the call that launched it, summed; of a graph's launch the first one only.
    overhead: of the profiler and driver, by name.
    first_nodes: as a gap's `nodes`, of `before_first`.
    profiler: what `without_profiler` took out of the parts and the total.
    """

    total: float
    before_first: float
    busy: float
    overlap: float
    gaps: tuple[Gap, ...]
    launches: int
    activities: int
    submitted: float
    tklqt: float
    overhead: dict[str, float]
    first_nodes: int = 0
    profiler: float = 0.0

    @property
    def gaps_host(self) -> float:
        return sum(gap.us for gap in self.gaps if gap.host)

    @property
    def gaps_device(self) -> float:
        return sum(gap.us for gap in self.gaps if not gap.host)

    @property
    def host(self) -> float:
        """All that the device waited for the host."""
        return self.before_first + self.gaps_host


def waterfall(step: StepTrace) -> StepWaterfall:
    activities = step.activities
    spans = [(activity.start, activity.stop) for activity in activities]
    launch: dict[int, Call] = {}
    for call in step.calls:
        launch.setdefault(call.correlation, call)  # where calls are nested, the outermost
    first_of: dict[int, Activity] = {}
    for activity in activities:
        first_of.setdefault(activity.correlation, activity)
    launched = [(launch[correlation], first) for correlation, first in first_of.items() if correlation in launch]
    last_launch = max((call.stop for call, _ in launched), default=step.begin)
    return StepWaterfall(
        total=step.end - step.begin,
        before_first=activities[0].start - step.begin,
        busy=length(union(spans)),
        overlap=overlap(spans),
        gaps=tuple(sorted(find_gaps(activities, launch), key=lambda gap: -gap.us)),
        launches=len(first_of),
        activities=len(activities),
        submitted=last_launch - step.begin,
        tklqt=sum(first.start - call.start for call, first in launched),
        overhead=step.overhead,
        first_nodes=_nodes(launch.get(activities[0].correlation), Counter(a.correlation for a in activities)),
    )


def lasting_gaps(steps: Sequence[StepWaterfall]) -> list[Gap]:
    """Those that most steps have at the same place, each with its median, largest first: not a hiccup of one step."""
    places: dict[int, list[Gap]] = {}
    for step in steps:
        for gap in step.gaps:
            places.setdefault(gap.place, []).append(gap)
    lasting = []
    for gaps in places.values():
        if 2 * len(gaps) > len(steps):
            gaps = sorted(gaps, key=lambda gap: gap.us)
            middle = gaps[len(gaps) // 2]
            lasting.append(replace(middle, us=statistics.median(gap.us for gap in gaps)))
    return sorted(lasting, key=lambda gap: -gap.us)


def find_gaps(activities: Sequence[Activity], launch: Mapping[int, Call]) -> list[Gap]:
    """Between the end of all that came before and the next start, in order. launch: by what a call's activities have.

    activities: in order of their start, at least one.
    """
    gaps, last = [], activities[0]
    seen, ran = {last.correlation}, Counter(activity.correlation for activity in activities)
    for place, activity in enumerate(activities[1:], start=1):
        if activity.start > last.stop:
            call = launch.get(activity.correlation)
            is_new = activity.correlation not in seen
            # A launch whose call had not returned when the device ran dry: it waited for the host.
            host = is_new and call is not None and _launched(call, activity) > last.stop
            nodes = _nodes(call, ran) if host else 0
            gaps.append(Gap(activity.start - last.stop, place, last.name, activity.name, host, nodes))
        seen.add(activity.correlation)
        if activity.stop > last.stop:
            last = activity
    return gaps


def _nodes(call: Call | None, ran: Mapping[int, int]) -> int:
    """Activities of a graph's launch; 0 for any other call. ran: activities by what they share with their call."""
    return ran[call.correlation] if call is not None and call.is_graph else 0


def _launched(call: Call, activity: Activity) -> float:
    """When, at the latest. A copy to pageable memory returns only when it is done."""
    waited = activity.kind == "gpu_memcpy" and call.stop >= activity.stop
    return call.start if waited else call.stop
