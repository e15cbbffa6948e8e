"""What the commands draw: answers and tables on standard output, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from stepgraph.cli.env import Check

MAX_ROUTES = 12
"""Routes that the table of a run lists; the rest is summed up in one line. JSON has them all."""


class ProgressBar:
    """A progress callback (done, total, what comes next) that draws a bar where standard error is a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)


def write(text: str) -> None:
    """Text as the model wrote it, shown at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_answer(number: int, total: int, prompt: str, answer: str) -> None:
    write(f"[{number}/{total}] {prompt.strip()}\n{answer.strip()}\n\n")


def print_checks(checks: Iterable[Check]) -> None:
    table = Table("", "", "version, or why not", "used for", box=None, pad_edge=False, header_style="dim")
    for check in checks:
        mark = "[green]yes[/]" if check.works else ("[red]NO[/]" if check.required else "[yellow]no[/]")
        table.add_row(mark, check.name, escape(check.detail), check.used_for)
    Console().print(table)


def print_memory(memory: Mapping[str, Any], kv_blocks: int) -> None:
    """Who has how much of the memory, at start-up: on standard error where that is a terminal, as the progress."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    table = Table("memory", box=None, pad_edge=False, header_style="dim")
    table.add_column("MiB", justify="right")
    for row in memory["rows"]:
        name = f"{row['name']} ({kv_blocks} blocks)" if row["name"] == "KV cache" else row["name"]
        table.add_row(name, f"{row['bytes'] / 2**20:,.1f}")
    if memory["total_bytes"] is not None:
        table.add_row("all there is", f"{memory['total_bytes'] / 2**20:,.1f}", style="bold")
    console.print(table)


def print_run(report: Mapping[str, Any]) -> None:
    """The closing table of `stepgraph run`, from the same mapping that --json prints."""
    steps, rows, seconds, speed = report["steps"], report["rows"], report["seconds"], report["tokens_per_second"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    mixed = sum(route["steps"] for route in report["routes"] if route["kind"] == "mixed")
    table.add_row("steps", f"{steps}: {steps - mixed} decode, {mixed} with prefill in them")
    share = f" ({rows['padded'] / (rows['real'] + rows['padded']):.1%} of all)" if rows["padded"] else ""
    table.add_row("rows", f"{rows['real']} real, {rows['padded']} padded{share}")
    table.add_row("modes", _counts(report["modes"]))
    table.add_row("reasons", _counts(report["reasons"]))
    routes = sorted(report["routes"], key=lambda route: -route["steps"])
    for route in sorted(routes[:MAX_ROUTES], key=lambda route: (route["kind"] == "mixed", -route["real"])):
        unit = "tokens" if route["kind"] == "mixed" else "rows"
        table.add_row(f"{route['real']} → {route['padded']} {unit}", _route(route))
    if len(routes) > MAX_ROUTES:
        rest = sum(route["steps"] for route in routes[MAX_ROUTES:])
        table.add_row("other sizes", f"{rest} steps at {len(routes) - MAX_ROUTES} sizes (--json lists them)")
    loops = report["loops"]
    if loops["launches"] or loops["not"]:
        alone = "".join(f"; one by one {count}: {reason}" for reason, count in loops["not"].items())
        table.add_row("loops", escape(f"{loops['steps']} steps in {loops['launches']} launches{alone}"))
    for cost in report["breaks"]:
        if cost["calls"]:
            each = f"{cost['host_us_per_call']:.0f} µs of the host each"
            table.add_row("break", escape(f"{cost['name']}: {cost['calls']} calls between graphs, {each}"))
    table.add_row("load", f"{seconds['load']:.2f} s ({report['model']}, {report['dtype']} on {report['device']})")
    captured = {"requests": report["captured_sizes"], "tokens": report["captured_tokens"]}
    sizes = [f"{', '.join(map(str, some))} {_unit(kind, some[-1])}" for kind, some in captured.items() if some]
    table.add_row("capture", f"{seconds['capture']:.2f} s ({'; '.join(sizes) or 'no graphs'})")
    if report["compile"] is not None:
        table.add_row("compile", _compiled(report["compile"], report["compiled_while_serving"]))
    table.add_row("memory", _memory(report["memory"]))
    for kind, coverage in (("requests", report["coverage"]), ("tokens", report["coverage_mixed"])):
        if captured[kind]:
            table.add_row("coverage", covered(kind, coverage))
    for change in report["changes"]:
        table.add_row(
            "changed", escape(f"{change['where']}: {change['before']} → {change['after']}, {change['reason']}")
        )
    for size, reason in report["dropped_sizes"].items():
        table.add_row("dropped", escape(f"{size}: {reason}"))
    table.add_row("tokens", f"{report['tokens']['prompt']} in prompts, {report['tokens']['generated']} generated")
    table.add_row("speed", f"decode {_speed(speed['decode'])}, overall {_speed(speed['overall'])}")
    Console().print(table)


def _compiled(total: Mapping[str, Any], serving: Mapping[str, Any]) -> str:
    sizes = f"{total['steps']} sizes in {total['pieces']} pieces, {total['distinct']} of them distinct"
    said = f"{total['seconds']:.2f} s ({total['backend']}: {sizes})"
    late = f"; of that {serving['steps']} while serving, {serving['seconds']:.2f} s" if serving["steps"] else ""
    return said + late


def _memory(memory: Mapping[str, Any]) -> str:
    taken = [(row["name"], f"{row['bytes'] / 2**20:,.0f} MiB") for row in memory["rows"] if row["bytes"]]
    return f"{', '.join(f'{name} {mib}' for name, mib in taken)} ({memory['kv_blocks']} KV blocks)"


def _route(route: Mapping[str, Any]) -> str:
    steps, padding = route["steps"], route["padded"] - route["real"]
    unit = "token" if route["kind"] == "mixed" else "row"
    each = " each" if steps > 1 else ""
    padded = f", {padding} padded {unit}{'' if padding == 1 else 's'}{each}" if padding else ""
    return f"{steps} {'step' if steps == 1 else 'steps'}{padded} ({route['mode']}, {route['reason']})"


def _unit(plural: str, most: int) -> str:
    return plural.removesuffix("s") if most == 1 else plural


def covered(kind: str, coverage: Sequence[int | None]) -> str:
    """`1 to 16 requests: all have graphs`. kind: what the batches count."""
    eager = sum(rung is None for rung in coverage)
    sizes = f"1 to {len(coverage)}" if len(coverage) > 1 else "1"
    return f"{sizes} {_unit(kind, len(coverage))}: " + _how_many(eager, len(coverage))


def _how_many(eager: int, of: int) -> str:
    return f"{eager} of {of} run eagerly" if eager else "all have graphs"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _speed(tokens_per_second: float | None) -> str:
    return "–" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"
