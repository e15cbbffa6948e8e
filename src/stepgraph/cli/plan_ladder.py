"""`stepgraph plan ladder`: capture sizes fitted to traffic. Needs no GPU: step times come from a measured curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import one_line_errors

A_SECOND = 1e6
"""In µs."""


@dataclass(frozen=True)
class LadderOptions:
    """The options of the command line; None where nothing was said."""

    traffic: Path
    curve: Path | None = None
    max_sizes: int = 12
    max_rows: int | None = None
    rate: float = 1.0
    holdout: bool = False
    row_us: float | None = None
    prefill_us: float | None = None
    max_mib: float | None = None
    max_seconds: float | None = None
    mib_a_size: float | None = None
    seconds_a_size: float | None = None
    picture: Path | None = None
    as_json: bool = False


def plan_ladder_command(
    traffic: Annotated[
        Path,
        typer.Argument(
            help="Rows and steps as JSON, the JSON of `stepgraph run`, a log of vLLM with --cudagraph-metrics, "
            "or a trace: Azure's CSV, Mooncake's JSONL."
        ),
    ],
    curve: Annotated[
        Path | None,
        typer.Option(
            help="JSON with the measured time of a step by its size (docs/ladder.md). Default: an H200's, of the shape "
            "of Llama-3-8B."
        ),
    ] = None,
    max_sizes: Annotated[int, typer.Option(help="Sizes, at most.")] = 12,
    max_rows: Annotated[
        int | None, typer.Option(help="Requests decoded at once, and the last size. Default: where the curve ends.")
    ] = None,
    rate: Annotated[float, typer.Option(help="A trace's arrivals, so many times as fast.")] = 1.0,
    holdout: Annotated[
        bool, typer.Option("--holdout", help="Fit to the first half of a trace, score on the second.")
    ] = False,
    row_us: Annotated[
        float | None,
        typer.Option(
            help="µs that a real row's context adds to a step, for a curve measured without context. Default: by the "
            "curve's own figure and the trace's mean context."
        ),
    ] = None,
    prefill_us: Annotated[
        float | None, typer.Option(help="µs of a prompt's token. Default: prompts are computed elsewhere.")
    ] = None,
    max_mib: Annotated[float | None, typer.Option(help="MiB of all sizes, at most; needs --mib-a-size.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Seconds to capture all sizes, at most; needs --seconds-a-size.")
    ] = None,
    mib_a_size: Annotated[float | None, typer.Option(help="MiB that one size takes; see `stepgraph memory`.")] = None,
    seconds_a_size: Annotated[float | None, typer.Option(help="Seconds that one size takes to capture.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw cost against the number of sizes into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON and nothing else.")] = False,
) -> None:
    """Fit the captured sizes to traffic, and compare them with vLLM's, SGLang's and TensorRT-LLM's."""
    with one_line_errors():
        run_plan_ladder(
            LadderOptions(
                traffic=traffic,
                curve=curve,
                max_sizes=max_sizes,
                max_rows=max_rows,
                rate=rate,
                holdout=holdout,
                row_us=row_us,
                prefill_us=prefill_us,
                max_mib=max_mib,
                max_seconds=max_seconds,
                mib_a_size=mib_a_size,
                seconds_a_size=seconds_a_size,
                picture=picture,
                as_json=as_json,
            )
        )


def run_plan_ladder(options: LadderOptions) -> None:
    """Read, fit, draw, print. Raises StepgraphError where a file or an option cannot work."""
    from stepgraph.measure.ladder_fit.limits import Limits
    from stepgraph.measure.ladder_fit.plan import plan_ladder
    from stepgraph.measure.ladder_fit.report import draw_plan, flags, plan_result
    from stepgraph.measure.ladder_fit.requests import Requests
    from stepgraph.measure.ladder_fit.server import Server
    from stepgraph.measure.ladder_fit.simulate import Prefill
    from stepgraph.measure.ladder_fit.step_times import load_step_times
    from stepgraph.measure.ladder_fit.traffic import load_traffic
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.runtime.errors import ConfigError

    if options.picture is not None:
        require_picture(options.picture)
    if not 0 <= (options.row_us or 0) <= A_SECOND or (
        options.prefill_us is not None and not 0 < options.prefill_us <= A_SECOND
    ):
        raise ConfigError("times: --row-us is not below 0, --prefill-us above it, and both are at most a second")
    most = Limits(
        options.max_sizes, options.max_mib, options.max_seconds, options.mib_a_size, options.seconds_a_size
    ).most()
    times, traffic = load_step_times(options.curve), load_traffic(options.traffic)
    context = traffic.mean_context if isinstance(traffic, Requests) else 0.0
    server = Server(
        times if options.max_rows is None else times.upto(options.max_rows),
        row_ns=round(times.token_ns * context if options.row_us is None else options.row_us * 1e3),
        prefill=None if options.prefill_us is None else Prefill(max(1, round(options.prefill_us * 1e3))),
    )
    plan = plan_ladder(
        server,
        traffic,
        most,
        rate=options.rate,
        holdout=options.holdout,
        pictured=options.picture is not None,
    )
    if options.picture is not None:
        draw_plan(plan, options.picture)
    show(plan_result(plan), as_json=options.as_json)
    if not options.as_json:
        for engine, line in flags(plan.fitted.ladder).items():
            print(f"{engine}: {line}")  # as one line, whatever the terminal's width, to be pasted
