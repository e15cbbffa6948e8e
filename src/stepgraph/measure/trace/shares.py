"""What a trace's steps consist of: kernels by share, launches by call, and what stands in the way of computing."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from stepgraph.measure.trace.intervals import length, union
from stepgraph.measure.trace.kineto import Activity, Call
from stepgraph.measure.trace.launches import Launch
from stepgraph.measure.trace.loop import TraceAccount

COMPUTE = "compute"
_COLLECTIVE = re.compile(
    r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|one_?shot_|two_?shot_|multimem|cross_device_reduce",
    re.IGNORECASE,
)
_COPIES = {"HtoD": "copies to the device", "DtoH": "copies to the host"}


@dataclass(frozen=True)
class KernelShare:
    """a_step: how often in a step, on average. us: of one, median. us_a_step: average. share: of all kernels' time."""

    name: str
    a_step: float
    us: float
    us_a_step: float
    share: float


@dataclass(frozen=True)
class CallShare:
    """Launches by one call of CUDA. a_step: on average. activities: of one launch, on average.

    host_us: of one, median. queue_us: from a call's start to its first activity's, median.
    """

    name: str
    a_step: float
    activities: float
    host_us: float
    queue_us: float


@dataclass(frozen=True)
class GroupShare:
    """Activities of one group, per step on average. alone_us: while nothing of another group ran."""

    name: str
    a_step: float
    us: float
    alone_us: float


@dataclass(frozen=True)
class WaitShare:
    """Calls in which the host waits for the device, per step on average.

    host_us: in the call. idle_us: that the device then waited for the host, because it ran dry during the call.
    """

    name: str
    a_step: float
    host_us: float
    idle_us: float


def group(activity: Activity) -> str:
    """collectives, copies by direction, memsets, or COMPUTE."""
    if activity.kind == "gpu_memset":
        return "memsets"
    if activity.kind == "gpu_memcpy":
        return next((name for kind, name in _COPIES.items() if kind in activity.name), "copies on the device")
    return "collectives" if _COLLECTIVE.search(activity.name) else COMPUTE


def kernel_shares(account: TraceAccount) -> list[KernelShare]:
    """Largest first; copies and memsets are no kernels."""
    took: dict[str, list[float]] = {}
    for activity in _activities(account):
        if activity.kind == "kernel":
            took.setdefault(activity.name, []).append(activity.stop - activity.start)
    steps, total = len(account.steps), sum(map(sum, took.values())) or 1.0
    shares = [
        KernelShare(name, len(us) / steps, statistics.median(us), sum(us) / steps, sum(us) / total)
        for name, us in took.items()
    ]
    return sorted(shares, key=lambda share: -share.us_a_step)


def call_shares(account: TraceAccount) -> list[CallShare]:
    """The most frequent first."""
    by_name: dict[str, list[Launch]] = {}
    for launches in account.launches:
        for launch in launches:
            by_name.setdefault(launch.call.name, []).append(launch)
    shares = [
        CallShare(
            name,
            len(launches) / len(account.steps),
            sum(len(launch.activities) for launch in launches) / len(launches),
            statistics.median(launch.call.stop - launch.call.start for launch in launches),
            statistics.median(launch.activities[0].start - launch.call.start for launch in launches),
        )
        for name, launches in by_name.items()
    ]
    return sorted(shares, key=lambda share: -share.a_step)


def group_shares(account: TraceAccount) -> list[GroupShare]:
    """By time, largest first."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for activity in _activities(account):
        groups.setdefault(group(activity), []).append((activity.start, activity.stop))
    covered = {name: union(spans) for name, spans in groups.items()}
    everything = length(union(span for spans in covered.values() for span in spans))
    steps, shares = len(account.steps), []
    for name, spans in groups.items():
        others = length(union(span for other, merged in covered.items() if other != name for span in merged))
        shares.append(GroupShare(name, len(spans) / steps, length(spans) / steps, (everything - others) / steps))
    return sorted(shares, key=lambda share: -share.us)


def wait_shares(account: TraceAccount) -> list[WaitShare]:
    """By the device's idling, largest first."""
    threads: dict[int, list[Call]] = {}
    for call in account.waits:
        threads.setdefault(call.thread, []).append(call)
    starts = {thread: [call.start for call in calls] for thread, calls in threads.items()}
    idle: dict[str, float] = {}
    for start, stop in account.waited:
        for thread, calls in threads.items():
            last = bisect_right(starts[thread], start) - 1
            if last >= 0 and calls[last].stop >= start:
                idle[calls[last].name] = idle.get(calls[last].name, 0.0) + stop - start
                break
    steps, waits = len(account.steps), set(account.waits)
    took: dict[str, list[float]] = {name: [] for name in idle}
    for call in (call for step in account.steps for call in step.calls if call in waits):
        took.setdefault(call.name, []).append(call.stop - call.start)
    shares = [
        WaitShare(name, len(us) / steps, sum(us) / steps, idle.get(name, 0.0) / steps) for name, us in took.items()
    ]
    return sorted(shares, key=lambda share: (-share.idle_us, -share.host_us))


def _activities(account: TraceAccount) -> Iterable[Activity]:
    return (activity for step in account.steps for activity in step.activities)
