"""What is said of a trace: its steps as figures and a waterfall, and what they consist of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stepgraph.measure.account import Accounted
from stepgraph.measure.machine import machine
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.measure.trace.kineto import Trace
from stepgraph.measure.trace.launches import busy_time
from stepgraph.measure.trace.loop import TraceAccount
from stepgraph.measure.trace.shares import KernelShare, call_shares, group_shares, kernel_shares, wait_shares
from stepgraph.measure.verdict import CAVEATS

MOST_ROWS = 16
"""Of a table; JSON has all kernels."""

MOST_STEPS = 4000
"""Whose figures are kept: a recording may hold a hundred thousand steps, and a bootstrap over all takes minutes."""

_ALONE = "from the step's beginning on the host, the device idle, to its last activity's end"
_FOLLOWING = "on the device, from the end of all that earlier steps ran to the end of what this one ran"
PARTS = {
    "before_first": ("before the first", "idle before the step's first activity: the device waits for the host"),
    "busy": ("busy", "the union of all activities' intervals in that time: kernels, copies, memsets"),
    "gaps_device": ("gaps, device", "idle between activities that had been launched in time"),
    "gaps_host": ("gaps, host", "idle before activities whose launching call had not returned when the device ran dry"),
}
"""The step's time, by the part of `StepWaterfall`: its name here, and what it is."""
_OTHERS = {
    "overlap": ("overlap", "by how much the durations of the step's activities add up to more than they cover"),
    "tklqt": ("TKLQT", "activity start less its launching call's start, summed; of a graph's launch its first alone"),
    "submitted": ("submitted", "host time from the step's beginning to the end of its last launch"),
}


def trace_result(path: Path, whole: Trace, mine: Trace, gpu: int, account: TraceAccount) -> Result:
    """whole: the trace as read. mine: what GPU `gpu` did of it."""
    one = Accounted("trace", account.waterfalls)
    said = one.verdict(None)
    kernels = kernel_shares(account)
    every = -(-len(account.steps) // MOST_STEPS)
    name = mine.gpus.get(gpu, "a GPU that the trace does not name")
    return Result(
        name="trace",
        definition=f"{path}: {_count(len(account.steps), 'step')} on GPU {gpu} ({name}); {account.how}.",
        figures=_figures(_thinned(account, every)),
        tables=[_waterfall(one), *_kinds(account), *_tables(account, kernels)],
        notes=[
            f"Bound by {said.bound}: {said.because}.",
            *(f"{finding}." for finding in said.findings),
            *([f"The figures are of one step in {every}; the tables are of all."] if every > 1 else []),
            *_oddities(whole, mine, gpu, account),
            *([] if account.alone else ["The first and the last step are left out: what surrounds them is not known."]),
            *CAVEATS,
        ],
        more={
            "verdict": {"bound": said.bound.value, "because": said.because, "findings": list(said.findings)},
            "kernels": [asdict(kernel) for kernel in kernels],
        },
        machine=f"recorded on {name}, read on {machine()}",
    )


def _thinned(account: TraceAccount, every: int) -> TraceAccount:
    return replace(
        account,
        steps=account.steps[::every],
        waterfalls=account.waterfalls[::every],
        launches=account.launches[::every],
    )


def _figures(account: TraceAccount) -> list[Figure]:
    steps = account.waterfalls
    parts = {"total": ("step", _ALONE if account.alone else _FOLLOWING), **PARTS, **_OTHERS}
    graphs = [sum(launch.is_graph for launch in launches) for launches in account.launches]
    return [
        *(Figure(name, "µs", what, [getattr(step, part) for step in steps]) for part, (name, what) in parts.items()),
        Figure("launches", "calls", "calls that had the device do something", [step.launches for step in steps]),
        Figure("graph launches", "calls", "those of them that launched a graph", graphs),
        Figure("activities", "activities", "kernels, copies and memsets", [step.activities for step in steps]),
        Figure(
            "host budget",
            "µs",
            "device time over what it ran: busy / activities",
            [step.busy / step.activities for step in steps],
        ),
        Figure("idle", "of a step", "1 - busy / step", [1 - step.busy / step.total for step in steps]),
        *_overheads(account),
    ]


def _overheads(account: TraceAccount) -> list[Figure]:
    names = dict.fromkeys(name for step in account.steps for name in step.overhead)
    return [
        Figure(name, "µs", "overhead, as the trace says", [step.overhead.get(name, 0.0) for step in account.steps])
        for name in names
    ]


def _waterfall(one: Accounted) -> Rows:
    parts = {name: one.median(part) for part, (name, _) in PARTS.items()}
    total = sum(parts.values())
    rows: list[list[Any]] = [[name, us, f"{us / total:.1%}"] for name, us in parts.items()]
    return Rows(
        "the waterfall of a step",
        ("part", "µs", "of all"),
        [*rows, ["in all", total, "100%"]],
        {"µs": "median over the steps, as above", "in all": "the sum of the rows"},
    )


def _kinds(account: TraceAccount) -> list[Rows]:
    kinds: dict[tuple[int, int], list[float]] = {}
    for step, launches in zip(account.waterfalls, account.launches, strict=True):
        key = (sum(launch.is_graph for launch in launches), step.launches)
        kinds.setdefault(key, []).append(step.total)
    if len(kinds) == 1:
        return []
    everything = sum(step.total for step in account.waterfalls)
    rows = [
        [launches, graphs, len(us), statistics.median(us), f"{sum(us) / everything:.1%}"]
        for (graphs, launches), us in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))
    ]
    columns = ("launches", "graph launches", "steps", "µs", "of all time")
    definitions = {"µs": "a step of this kind, median", "of all time": "all its steps over all steps"}
    return [Rows("kinds of steps", columns, rows[:MOST_ROWS], definitions)]


def _tables(account: TraceAccount, kernels: Sequence[KernelShare]) -> list[Rows]:
    shown: list[list[Any]] = [
        [short(kernel.name), kernel.a_step, kernel.us, kernel.us_a_step, f"{kernel.share:.1%}"]
        for kernel in kernels[:MOST_ROWS]
    ]
    rest = kernels[MOST_ROWS:]
    if rest:
        us, share = sum(kernel.us_a_step for kernel in rest), sum(kernel.share for kernel in rest)
        shown.append([f"{len(rest)} others", sum(kernel.a_step for kernel in rest), None, us, f"{share:.1%}"])
    a_step = "how often in a step, on average over the steps"
    tables = [
        Rows(
            "kernels by share",
            ("kernel", "a step", "µs each", "µs a step", "of all kernels"),
            shown,
            {"a step": a_step, "µs each": "median", "of all kernels": "of their durations, added up"},
        ),
        Rows(
            "launches",
            ("call", "a step", "activities each", "host µs each", "queue µs each"),
            [[c.name, c.a_step, c.activities, c.host_us, c.queue_us] for c in call_shares(account)],
            {
                "activities each": "average",
                "host µs each": "in the call, median",
                "queue µs each": "from the call's start to its first activity's start, median",
            },
        ),
        Rows(
            "what the device does",
            ("activities", "a step", "µs a step", "alone, µs a step"),
            [[g.name, g.a_step, g.us, g.alone_us] for g in group_shares(account)],
            {"alone, µs a step": "while nothing of another row ran: what the step would win without it, at most"},
        ),
    ]
    waits = [[w.name, w.a_step, w.host_us, w.idle_us] for w in wait_shares(account)]
    columns = ("the host waits in", "a step", "host µs a step", "device idle, µs a step")
    idle = "waiting for the host, which was in this call when the device ran dry"
    return [*tables, *([Rows("waits", columns, waits, {"device idle, µs a step": idle})] if waits else [])]


def _oddities(whole: Trace, mine: Trace, gpu: int, account: TraceAccount) -> list[str]:
    said = []
    if account.unlaunched:
        said.append(
            f"{account.unlaunched:,} of {len(mine.activities):,} activities have no launching call in the trace."
        )
    if account.early:
        early = _count(account.early, "launch", "launches")
        said.append(f"{early} began on the device before the call: the clocks disagree.")
    if any(activity.name.endswith(", as a whole") for activity in mine.activities):
        said.append("Graphs were recorded as a whole; nsys profile --cuda-graph-trace=node shows what they run.")
    others = sorted(set(busy_time(whole)) - {gpu})
    if others:
        said.append(f"The trace also has GPU {', '.join(map(str, others))}; --gpu chooses.")
    return said


def short(name: str, most: int = 80) -> str:
    """A kernel's name with its middle left out: what tells two templates apart stands at the end."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
