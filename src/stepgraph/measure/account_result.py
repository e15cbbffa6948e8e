"""What an account says: a waterfall, figures with their definitions, a verdict, and how far it can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from stepgraph.measure.account import Accounted
from stepgraph.measure.picture import new_picture, save_picture
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.measure.stamps import CrossCheck
from stepgraph.measure.stats import ratio
from stepgraph.measure.verdict import CAVEATS
from stepgraph.measure.work import BYTES_DEFINITION, FLOPS_DEFINITION, Floor

MOST_RESIDUAL = 0.01
"""Of a step, what the waterfall's rows may leave to the events' time."""

_TIMES = {
    "total": (
        "total",
        "from the step's beginning on the host, the device idle, to its last activity's end; by the trace, less the "
        "profiler's own where that is known",
    ),
    "before_first": (
        "before the first",
        "until the first activity starts: the device waits for the host; less as above",
    ),
    "busy": ("busy", "the union of all activities' intervals: kernels, copies, memsets"),
    "overlap": ("overlap", "by how much the activities' durations add up to more than `busy`"),
    "gaps_device": ("gaps, device", "idle between activities that had been launched in time"),
    "gaps_host": (
        "gaps, host",
        "idle before activities whose launching call had not returned when the device ran dry; less as above",
    ),
    "tklqt": (
        "TKLQT",
        "activity start less its launching call's start, summed; of a graph's launch its first alone; as traced",
    ),
    "submitted": ("submitted", "host time from the step's beginning to the end of its last launch; as traced"),
}
"""By the part of `StepWaterfall`: its name here, and what it is."""
_BUSY_ROWS = {
    "reading": "the step's bytes at the read limit",
    "arithmetic": "what its arithmetic adds to that at the limit of arithmetic, weights and attention apart",
    "kernels beyond": "busy time beyond these two",
}
_IDLE_ROWS = ("gaps_device", "gaps_host", "before_first")
_PROFILER = (
    "the profiler's own",
    "what events see more of a step with the profiler on, as far as the device waited for a graph's launch: with each "
    "node it takes longer then. Launches of single kernels are each a little dearer; nothing is taken from them",
)
_RESIDUAL = "residual"
_RESIDUAL_IS = "what the events' time of the same steps differs by from the sum of the rows above"


def waterfall_rows(found: Accounted, floor: Floor | None) -> dict[str, float]:
    """The step's time in µs, row by row.

    Without a floor busy time is one row. Without events there is no residual, and the profiler's own is not known.
    """
    busy = found.median("busy")
    rows = {"kernels": busy}
    if floor is not None:
        least = (floor.read, floor.total - floor.read)
        rows = dict(zip(_BUSY_ROWS, (*least, busy - floor.total), strict=True))
    rows |= {_TIMES[part][0]: found.median(part) for part in _IDLE_ROWS}
    if found.plain:
        rows[_PROFILER[0]] = found.median("profiler")
    if found.residual is not None:
        rows[_RESIDUAL] = found.residual
    return rows


def account_result(
    what: str, found: Sequence[Accounted], *, floor: Floor | None = None, check: CrossCheck | None = None
) -> Result:
    """what: names the step. found: the ways that it was run."""
    figures = [] if floor is None else _floor_figures(floor)
    notes = []
    for one in found:
        figures += _figures(one)
        said = one.verdict(floor)
        notes += [f"{one.name}: bound by {said.bound}: {said.because}.", *(f"{one.name}: {f}." for f in said.findings)]
        notes += _trust(one)
    if len(found) == 2 and all(one.plain for one in found):
        a, b = found
        middle, low, high = ratio(list(zip(a.plain, b.plain, strict=True)))
        notes.append(f"{a.name} / {b.name}, in turns, without the profiler: {middle:.2f} ({low:.2f} to {high:.2f}).")
    if check is not None:
        figures += _check_figures(check)
        middle, low, high = ratio(list(zip(check.traced, check.profiled, strict=True)))
        notes.append(
            f"The trace's span of a step / the clock read inside it, the same steps: "
            f"{middle:.3f} ({low:.3f} to {high:.3f})."
        )
    return Result(
        name="account",
        definition=f"{what}: where the time of one step goes, by its median over the steps.",
        figures=figures,
        tables=[_table(found, floor)],
        notes=[*notes, *CAVEATS],
        more={"verdicts": {one.name: _verdict_json(one, floor) for one in found}},
    )


def draw(path: Path, found: Sequence[Accounted], floor: Floor | None, what: str) -> None:
    """The waterfalls as bars above each other, as PNG. Raises ConfigError where the file cannot be written."""
    picture = new_picture(9, 2 + 0.6 * len(found))
    axes = picture.subplots()
    left = [0.0] * len(found)
    rows = [waterfall_rows(one, floor) for one in found]
    for name in rows[0]:
        widths = [max(row[name], 0.0) for row in rows]
        if name == _RESIDUAL or not any(widths):
            continue
        axes.barh([one.name for one in found], widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    axes.set_title(what, fontsize=9, loc="left")
    picture.legend(ncols=3, fontsize=8, loc="outside lower center")
    save_picture(picture, path)


def _table(found: Sequence[Accounted], floor: Floor | None) -> Rows:
    columns = ["part"]
    for one in found:
        columns += [f"{one.name}, µs", f"{one.name}, of all"]
    waterfalls = [waterfall_rows(one, floor) for one in found]
    sums = [sum(rows.values()) for rows in waterfalls]
    rows: list[list[str | float]] = []
    for name in waterfalls[0]:
        row: list[str | float] = [name]
        for values, total in zip(waterfalls, sums, strict=True):
            row += [values[name], f"{values[name] / total:.1%}"]
        rows.append(row)
    rows.append(["in all", *(cell for total in sums for cell in (total, "100%"))])
    known = {**_BUSY_ROWS, "kernels": _TIMES["busy"][1], **dict((_PROFILER, *_TIMES.values())), _RESIDUAL: _RESIDUAL_IS}
    definitions = {name: known[name] for name in waterfalls[0]}
    return Rows("the waterfall of a step", columns, rows, {**definitions, "in all": "the sum of the rows"})


def _figures(one: Accounted) -> list[Figure]:
    def samples(part: str) -> list[float]:
        return [float(getattr(step, part)) for step in one.steps]

    parts = one.parts(None)
    budget = [step.busy / step.activities for step in one.steps]
    cost = [step.submitted / step.launches for step in one.steps]
    idle = [1 - step.busy / step.total for step in one.steps]
    figures = [
        *(Figure(f"{one.name}: {name}", "µs", what, samples(part)) for part, (name, what) in _TIMES.items()),
        Figure.of(f"{one.name}: launches", parts.launches, "calls", "calls that had the device do something"),
        Figure.of(f"{one.name}: activities", parts.activities, "activities", "kernels, copies and memsets of a step"),
        Figure(f"{one.name}: host budget", "µs", "device time over what it ran: busy / activities", budget),
        Figure(
            f"{one.name}: host cost", "µs", "host time over what it launched: submitted / launches; as traced", cost
        ),
        Figure(f"{one.name}: idle", "of a step", "1 - busy / total", idle),
    ]
    if one.profiled:
        events = "between events at the beginning and the end of a step, the profiler on: the steps of the trace"
        figures.append(Figure(f"{one.name}: events, profiled", "µs", events, one.profiled))
    if one.plain:
        figures.append(Figure(f"{one.name}: events", "µs", "between the same events, the profiler off", one.plain))
        figures.append(Figure(f"{one.name}: {_PROFILER[0]}", "µs", _PROFILER[1], samples("profiler")))
    if one.profiled and one.plain:
        stretched = [with_it / without for with_it, without in zip(one.profiled, one.plain, strict=True)]
        figures.append(Figure(f"{one.name}: dilation", "ratio", "events, profiled / events", stretched))
    for name, us in _overheads(one).items():
        figures.append(Figure.of(f"{one.name}: {name}", us, "µs", "overhead a step, as the trace says; median"))
    return figures


def _floor_figures(floor: Floor) -> list[Figure]:
    return [
        Figure.of("reading", floor.read, "µs", f"bytes over the read limit. {BYTES_DEFINITION}"),
        Figure.of("arithmetic", floor.compute, "µs", f"operations over the limit of arithmetic. {FLOPS_DEFINITION}"),
        Figure.of("floor", floor.total, "µs", "of weights and of attention whichever of the two is longer, added up"),
    ]


def _check_figures(check: CrossCheck) -> list[Figure]:
    clock = "the device's clock, read by the first and the last node of the step"
    return [
        Figure("clock inside", "µs", f"{clock}, the profiler off", check.plain),
        Figure("clock inside, profiled", "µs", f"{clock}, the profiler on", check.profiled),
        Figure("span, traced", "µs", "from the first activity's start to the last one's end, same steps", check.traced),
    ]


def _trust(one: Accounted) -> list[str]:
    """What the reader must know before believing the rows."""
    said = []
    if one.profiled and one.residual is not None:
        share = one.residual / statistics.median(one.profiled)
        verdict = "within" if abs(share) <= MOST_RESIDUAL else "BEYOND"
        said.append(f"{one.name}: residual {share:+.2%} of the step, {verdict} {MOST_RESIDUAL:.0%}.")
    if one.profiled and one.plain:
        middle, low, high = ratio(list(zip(one.profiled, one.plain, strict=True)))
        said.append(
            f"{one.name}: the profiler stretches the step by {middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})."
        )
    return said


def _overheads(one: Accounted) -> dict[str, float]:
    names = dict.fromkeys(name for step in one.steps for name in step.overhead)
    return {name: statistics.median(step.overhead.get(name, 0.0) for step in one.steps) for name in names}


def _verdict_json(one: Accounted, floor: Floor | None) -> dict[str, str | list[str]]:
    said = one.verdict(floor)
    return {"bound": said.bound.value, "because": said.because, "findings": list(said.findings)}
