"""Finds where the steps of any program begin: at annotations, or at a launch that comes back once a step."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Span, Trace
from stepgraph.measure.trace.launches import Launch, waits

LEAST_STARTS = 4
"""A step is told by the next one's beginning and held against the end of the one before: two steps are left of four."""
LEAST_COVER = 0.5
"""Of all launches or activities, what steps must hold."""
MOST = 0.6
"""Of all steps, those that must look alike, and those that must have the host wait."""
ALIKE = 0.1
"""Steps are alike where their launches differ from the median by no more than this share, or by 2."""
ROUNDING = 0.5
"""µs that a trace's times may be off by; a float holds µs since 1970 to a quarter."""

_TORCHS = "ProfilerStep##"
_BRACKETS, _DIGITS = re.compile(r"\[[^]]*]|\([^)]*\)"), re.compile(r"\d+")


@dataclass(frozen=True)
class Starts:
    """how: in words, what steps begin with. at: µs on the host, in order, at least LEAST_STARTS."""

    how: str
    at: tuple[float, ...]


def find_starts(trace: Trace, launches: Sequence[Launch], named: str | None = None) -> Starts:
    """named: a part of the name of the annotation, kernel or call that each step begins with; else it is looked for.

    Raises:
        TraceError: there are no such steps, or none that can be told without `named`.
    """
    if named is not None:
        if not named.strip():
            raise TraceError("--step is empty; give a part of the name of an annotation, a kernel or a call")
        return _named(trace, launches, named)
    found = _annotated(trace.annotations, launches) or _recurring(launches, _read_back(trace, launches))
    if found is None:
        raise TraceError(
            f"no steps found: no annotation and no launch comes back {LEAST_STARTS} times or more at even distances; "
            "name what each step begins with by --step, such as a part of a kernel's name"
        )
    return found


def _named(trace: Trace, launches: Sequence[Launch], named: str) -> Starts:
    spans = [span for span in trace.annotations if named in span.name]
    outer: list[Span] = []
    for span in spans:
        if not outer or span.start >= outer[-1].stop:
            outer.append(span)
    kernels = [x.call.start for x in launches if any(named in activity.name for activity in x.activities)]
    calls = [call.start for call in trace.calls if named in call.name]
    ways = {"annotation": [span.start for span in outer], "launch": kernels, "call": calls}
    for what, at in ways.items():
        if len(at) >= LEAST_STARTS:
            return Starts(f"each begins with the {what} named {named!r}", tuple(at))
    most = max(len(at) for at in ways.values())
    raise TraceError(f"--step {named!r} is in the trace {most} times; steps need {LEAST_STARTS} beginnings or more")


def _annotated(annotations: Sequence[Span], launches: Sequence[Launch]) -> Starts | None:
    """The annotation that covers most of what ran, and torch's own before all others."""
    groups: dict[tuple[str, int], list[Span]] = {}
    for span in annotations:
        name = _DIGITS.sub("#", _BRACKETS.sub("[]", span.name))
        groups.setdefault((name, span.thread), []).append(span)
    at = [launch.call.start for launch in launches]
    before = [0, *accumulate(len(launch.activities) for launch in launches)]
    best: tuple[bool, float, int, float] | None = None
    found = None
    for (name, _), spans in groups.items():
        if len(spans) < LEAST_STARTS or any(a.stop > b.start + ROUNDING for a, b in pairwise(spans)):
            continue
        inside = sum(before[bisect_left(at, span.stop)] - before[bisect_left(at, span.start)] for span in spans)
        cover = inside / before[-1]
        rank = (name == _TORCHS, round(cover, 2), len(spans), -spans[0].start)
        if cover >= LEAST_COVER and (best is None or rank > best):
            best, found = rank, Starts(f"each begins with an annotation like {spans[0].name!r}", _starts(spans))
    return found


def _starts(spans: Sequence[Span]) -> tuple[float, ...]:
    return tuple(span.start for span in spans)


def _read_back(trace: Trace, launches: Sequence[Launch]) -> list[int]:
    """In front of which launches the host waited for the device or had it copy something back."""
    at = [launch.call.start for launch in launches]
    waited = {bisect_right(at, call.start) for call in waits(trace, launches)}
    return sorted(waited | {place + 1 for place, launch in enumerate(launches) if launch.to_host})


def _recurring(launches: Sequence[Launch], read_back: Sequence[int]) -> Starts | None:
    """The launch that comes back at even distances.

    Layers do so too. Between two steps the host reads what came out, between two layers it does not: so of all such
    launches the most frequent one with a wait in each turn counts, and of its like the one closest behind the wait.
    Where the host never read_back, it is the rarest.
    """
    places: dict[tuple[str, int], list[int]] = {}
    for place, launch in enumerate(launches):
        places.setdefault((launch.activities[0].name, len(launch.activities)), []).append(place)
    even = [at for at in places.values() if _is_even(at, len(launches))]
    if not even:
        return None
    waited = [at for at in even if _share_with_wait(at, read_back) >= MOST]
    if waited:
        most = max(map(len, waited))
        chosen = min((at for at in waited if len(at) >= most - 2), key=lambda at: (_behind(at, read_back), at[0]))
    else:
        unread = [at for at in even if bisect_left(read_back, at[-1]) - bisect_right(read_back, at[0]) < 2]
        if not unread:
            return None
        fewest = min(map(len, unread))
        chosen = min(at for at in unread if len(at) <= fewest + 1)
    first = launches[chosen[0]]
    what = f"a graph of {len(first.activities)} that starts with" if first.is_graph else "the launch of"
    return Starts(
        f"each begins with {what} {first.activities[0].name!r}, which comes back at even distances",
        tuple(launches[place].call.start for place in chosen),
    )


def _is_even(at: Sequence[int], count: int) -> bool:
    if len(at) < LEAST_STARTS or at[-1] - at[0] < LEAST_COVER * (count - 1):
        return False
    lengths = [b - a for a, b in pairwise(at)]
    middle = statistics.median(lengths)
    alike = sum(abs(length - middle) <= max(2, ALIKE * middle) for length in lengths if middle > 2 or length == middle)
    return alike >= MOST * len(lengths)


def _share_with_wait(at: Sequence[int], read_back: Sequence[int]) -> float:
    with_wait = sum(bisect_right(read_back, a) < bisect_right(read_back, b) for a, b in pairwise(at))
    return with_wait / (len(at) - 1)


def _behind(at: Sequence[int], read_back: Sequence[int]) -> float:
    """How many launches stand between the last wait and these, in the median."""
    last = [bisect_right(read_back, place) for place in at]
    return statistics.median(
        place - (read_back[index - 1] if index else 0) for place, index in zip(at, last, strict=True)
    )
