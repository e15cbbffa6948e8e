"""Steps that follow each other, as a program runs them: the end of one is where the next one's time begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.find_steps import find_starts
from stepgraph.measure.trace.intervals import Interval, overlap
from stepgraph.measure.trace.kineto import Activity, Call, Trace
from stepgraph.measure.trace.launches import Launch, join, waits
from stepgraph.measure.trace.steps import StepTrace, between_marks, split_steps
from stepgraph.measure.trace.waterfall import Gap, StepWaterfall, find_gaps, waterfall


@dataclass(frozen=True)
class TraceAccount:
    """The steps of a trace that are accounted for.

    how: in words, how they were found. alone: each began with the device idle, by the marks of our own instruments.
    launches: of each step. waited: when the device had nothing left that the host had launched, in order. waits: calls
    in which the host waited for the device, in order; also of steps that are left out. unlaunched: activities whose
    launch is not in the trace. early: launches that ran before they were called, if the clocks are to be believed.
    """

    how: str
    alone: bool
    steps: tuple[StepTrace, ...]
    waterfalls: tuple[StepWaterfall, ...]
    launches: tuple[tuple[Launch, ...], ...]
    waited: tuple[Interval, ...]
    waits: tuple[Call, ...]
    unlaunched: int
    early: int


def account_for(trace: Trace, named: str | None = None) -> TraceAccount:
    """trace: of one device. named: as for `find_starts`.

    Raises:
        TraceError: no steps are found.
    """
    launches = join(trace)
    if named is None and _is_marked(trace, launches):
        return _alone(trace, launches)
    starts = find_starts(trace, launches, named)
    steps, inside = _cut(trace, launches, starts.at)
    if len(steps) < 2:
        raise TraceError(f"{starts.how}, but fewer than two of them ran anything; name another beginning by --step")
    return _following(trace, launches, starts.how, steps, inside)


def _is_marked(trace: Trace, launches: Sequence[Launch]) -> bool:
    """Whether most launches stand between marks: a program may happen to synchronise that often somewhere."""
    marked = {call.correlation for _, _, calls in between_marks(trace) for call in calls}
    return 2 * sum(launch.call.correlation in marked for launch in launches) > len(launches)


def _alone(trace: Trace, launches: Sequence[Launch]) -> TraceAccount:
    steps = split_steps(trace)
    by_correlation = {launch.call.correlation: launch for launch in launches}
    waterfalls = [waterfall(step) for step in steps]
    waited: list[Interval] = []
    inside = []
    for step, fall in zip(steps, waterfalls, strict=True):
        waited.append((step.begin, step.activities[0].start))
        waited += sorted(_intervals([gap for gap in fall.gaps if gap.host], step.activities))
        seen = dict.fromkeys(call.correlation for call in step.calls)
        inside.append(tuple(by_correlation[key] for key in seen if key in by_correlation))
    how = "each stands between the marks that stepgraph's own instruments make"
    return _account(trace, launches, how, True, steps, waterfalls, inside, waited)


def _cut(
    trace: Trace, launches: Sequence[Launch], at: Sequence[float]
) -> tuple[list[StepTrace], list[tuple[Launch, ...]]]:
    """From each start to the next; those that ran nothing are left out. What comes behind the last start is too."""
    calls, starts = [call.start for call in trace.calls], [launch.call.start for launch in launches]
    overheads = [span.start for span in trace.overheads]
    steps, inside = [], []
    for begin, until in pairwise(at):
        mine = tuple(launches[bisect_left(starts, begin) : bisect_left(starts, until)])
        if not mine:
            continue
        overhead: dict[str, float] = {}
        for span in trace.overheads[bisect_left(overheads, begin) : bisect_left(overheads, until)]:
            overhead[span.name] = overhead.get(span.name, 0.0) + span.stop - span.start
        activities = sorted((a for launch in mine for a in launch.activities), key=lambda a: a.start)
        here = trace.calls[bisect_left(calls, begin) : bisect_left(calls, until)]
        steps.append(StepTrace(begin, here, tuple(activities), overhead))
        inside.append(mine)
    return steps, inside


def _following(
    trace: Trace, launches: Sequence[Launch], how: str, steps: list[StepTrace], inside: list[tuple[Launch, ...]]
) -> TraceAccount:
    """The device's time without a hole: each step has it from the end of all before to its own end.

    A step that ends before one in front of it has no time of its own and is left out.
    """
    launch = {one.call.correlation: one.call for one in launches}
    all_gaps = find_gaps(trace.activities, launch)
    idle = _intervals(all_gaps, trace.activities)
    idle_from = [start for start, _ in idle]
    begins = [activity.start for activity in trace.activities]
    kept, waterfalls, launched, waited = [], list[StepWaterfall](), [], list[Interval]()
    last = steps[0].end
    for step, mine in zip(steps[1:], inside[1:], strict=True):
        if step.end <= last:
            continue
        first, behind = bisect_left(idle_from, last), bisect_left(idle_from, step.end)
        before = bisect_left(begins, last)
        gaps, before_first = [], 0.0
        for gap, (start, stop) in zip(all_gaps[first:behind], idle[first:behind], strict=True):
            if gap.host:
                waited.append((start, stop))
            if gap.host and start == last:
                before_first = gap.us
            else:
                gaps.append(replace(gap, place=gap.place - before))
        waterfalls.append(_waterfall(step, mine, last, before_first, gaps))
        kept.append(step)
        launched.append(mine)
        last = step.end
    if not kept:
        raise TraceError("no step is left: what the first of them launched ends behind all others")
    return _account(trace, launches, how, False, kept, waterfalls, launched, waited)


def _account(
    trace: Trace,
    launches: Sequence[Launch],
    how: str,
    alone: bool,
    steps: Sequence[StepTrace],
    waterfalls: Sequence[StepWaterfall],
    inside: Sequence[tuple[Launch, ...]],
    waited: Sequence[Interval],
) -> TraceAccount:
    return TraceAccount(
        how,
        alone,
        tuple(steps),
        tuple(waterfalls),
        tuple(inside),
        tuple(waited),
        waits=tuple(waits(trace, launches)),
        unlaunched=len(trace.activities) - sum(len(launch.activities) for launch in launches),
        early=sum(launch.activities[0].start < launch.call.start for launch in launches),
    )


def _waterfall(
    step: StepTrace, launches: Sequence[Launch], begin: float, before_first: float, gaps: list[Gap]
) -> StepWaterfall:
    total = step.end - begin
    return StepWaterfall(
        total=total,
        before_first=before_first,
        busy=total - before_first - sum(gap.us for gap in gaps),
        overlap=overlap([(activity.start, activity.stop) for activity in step.activities]),
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.us)),
        launches=len(launches),
        activities=len(step.activities),
        submitted=max(launch.call.stop for launch in launches) - step.begin,
        tklqt=sum(launch.activities[0].start - launch.call.start for launch in launches),
        overhead=step.overhead,
    )


def _intervals(gaps: Sequence[Gap], activities: Sequence[Activity]) -> list[Interval]:
    """Of gaps as `find_gaps` has them, in the same order."""
    ended = list(accumulate((activity.stop for activity in activities), max))
    return [(ended[gap.place - 1], activities[gap.place].start) for gap in gaps]
