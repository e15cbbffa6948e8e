"""`stepgraph padding`: what padding costs in rows and in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.measure.curve import LatencyCurve
    from stepgraph.measure.padding import Route
    from stepgraph.measure.padding_result import Measured

CONTEXT = 512
"""Tokens a row, where the user names no number."""
MOST_ROWS = {"cuda": 512, "cpu": 16}
"""Of the curve, where the user names no number: a CPU takes its time for larger steps."""
NOTHING_MEASURED = "Nothing was measured now: the times are those of the curve in {}."


@dataclass(frozen=True)
class PaddingOptions:
    """The options of the command line; None where the default depends on the machine."""

    model: str | None = None
    run: Path | None = None
    curve: Path | None = None
    pairs: str | None = None
    max_rows: int | None = None
    context: int | None = None
    device: str | None = None
    attention: str | None = None
    operations: str | None = None
    prometheus: bool = False
    picture: Path | None = None
    as_json: bool = False


def run_padding(options: PaddingOptions) -> None:
    """Measure or read the curve, and print. Raises StepgraphError where a file, the model or an option cannot work."""
    from stepgraph.measure.curve import load_curve
    from stepgraph.measure.padding import load_routes, to_prometheus
    from stepgraph.measure.padding_result import padding_result
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.runtime.errors import ConfigError

    if options.picture is not None:
        require_picture(options.picture)
    if options.prometheus and options.run is None:
        raise ConfigError("padding: --prometheus prints the steps of a run; give one with --run")
    if options.prometheus and options.as_json:
        raise ConfigError("padding: --prometheus and --json are two forms; give one of them")
    of_measuring = {
        "the model": options.model,
        "--pairs": options.pairs,
        "--max-rows": options.max_rows,
        "--context": options.context,
        "--attention": options.attention,
        "--operations": options.operations,
    }
    given = [name for name, value in of_measuring.items() if value is not None]
    if options.curve is not None and given:
        raise ConfigError(f"padding: with --curve nothing is measured; leave out {', '.join(given)}, or the curve")
    if options.max_rows is not None and options.max_rows < 1:
        raise ConfigError(f"padding: --max-rows is {options.max_rows}; the largest size of the curve is at least 1")
    routes = [] if options.run is None else load_routes(options.run)
    if options.curve is not None:
        curve = load_curve(options.curve)
        result = padding_result(curve, routes, notes=[NOTHING_MEASURED.format(options.curve)])
    else:
        measured, notes = _measure(options)
        curve = measured.curve
        result = padding_result(curve, routes, measured, notes)
    if options.picture is not None:
        draw(options.picture, curve, routes)
    if options.prometheus:
        print(to_prometheus(routes, curve), end="")
    else:
        show(result, as_json=options.as_json)


def draw(path: Path, curve: LatencyCurve, routes: Sequence[Route]) -> None:
    """A PNG: the latency curve, and the time that each route of the run lost.

    Raises:
        ConfigError: it cannot be written.
    """
    from stepgraph.measure.picture import new_picture, save_picture
    from stepgraph.measure.stats import quantiles

    lost = [(route, route.padding_ms(curve)) for route in routes]
    dear = sorted(((route, one * route.steps) for route, one in lost if one), key=lambda item: item[1])[-20:]
    picture = new_picture(12 if dear else 7, 5)
    axes = picture.subplots(1, 2 if dear else 1, squeeze=False)[0]
    spreads = [quantiles(curve.samples[size]) for size in curve.sizes]
    axes[0].plot(curve.sizes, [found["median"] for found in spreads], ".-", label="median")
    low, high = ([found[end] for found in spreads] for end in ("p10", "p90"))
    axes[0].fill_between(curve.sizes, low, high, alpha=0.3, label="p10 to p90")
    axes[0].set(xlabel="rows", ylabel="ms a step", title="latency curve", ylim=(0, None))
    axes[0].legend()
    if dear:
        axes[1].barh([f"{route.real} → {route.padded} ({route.steps})" for route, _ in dear], [ms for _, ms in dear])
        axes[1].set_ylim(-0.7, max(len(dear), 5) - 0.3)
        axes[1].set(xlabel="ms in all", title="time of padding, by real and padded size (steps)")
    save_picture(picture, path)


def _measure(options: PaddingOptions) -> tuple[Measured, list[str]]:
    """With what was left out of it."""
    from stepgraph.measure.decode import load_model
    from stepgraph.measure.padded_pairs import CHAPTER, parse_pairs
    from stepgraph.measure.padding_result import measure_padding
    from stepgraph.runtime.platforms import platform_for

    device = default_device(options.device)
    platform_for(device)  # refuses a device that is not there
    most = MOST_ROWS[device] if options.max_rows is None else options.max_rows
    pairs = [pair for pair in CHAPTER if pair[1] <= most] if options.pairs is None else parse_pairs(options.pairs)
    left_out = [f"{real} → {padded}" for real, padded in CHAPTER if options.pairs is None and padded > most]
    notes = [f"Left out: {', '.join(left_out)}; the largest batch is {most} rows (--max-rows)."] if left_out else []
    context = CONTEXT if options.context is None else options.context
    model = load_model(options.model, device=device, max_len=context + 1, operations=options.operations)
    name = options.model or "the demo model"
    found = measure_padding(model, name, most=most, context=context, pairs=pairs, attention=options.attention)
    return found, notes
