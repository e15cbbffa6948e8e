"""`stepgraph account`: where the time of a decode step goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.cli.options import Json, Operations, Where, default_device, not_empty, one_line_errors
from stepgraph.cli.step_commands import Model

if TYPE_CHECKING:
    from stepgraph.measure.result import Result

NO_GPU = (
    "There is no GPU here, so there is no timeline to account for; a trace from elsewhere can be read with --trace. "
    "What can be said without one is the arithmetic of --predict:"
)


class Gpu(StrEnum):
    H100 = "h100"
    H200 = "h200"


@dataclass(frozen=True)
class AccountOptions:
    """The options of the command line; None where the default depends on the machine or the model."""

    model: str | None = None
    predict: str | None = None
    tp: int = 1
    gpu: str = "h100"
    trace: Path | None = None
    rows: int | None = None
    context: int | None = None
    device: str | None = None
    operations: str | None = None
    picture: Path | None = None
    as_json: bool = False


def account_command(
    model: Model = None,
    predict: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="No measurement: the host's budget for this model.", callback=not_empty),
    ] = None,
    tp: Annotated[int, typer.Option(help="With --predict: GPUs that share the weights.")] = 1,
    gpu: Annotated[Gpu, typer.Option(help="With --predict: the card.")] = Gpu.H100,
    trace: Annotated[
        Path | None, typer.Option(help="No measurement: account for the steps in this trace of torch's profiler.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Requests that decode, of a measurement. Default: 1.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens that each of them attends to, of a measurement. Default: 512.")
    ] = None,
    device: Where = None,
    operations: Operations = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the waterfall into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a decode step goes, as a graph and eagerly, and what it is bound by."""
    with one_line_errors():
        run_account(
            AccountOptions(
                model=model,
                predict=predict,
                tp=tp,
                gpu=gpu.value,
                trace=trace,
                rows=rows,
                context=context,
                device=None if device is None else device.value,
                operations=operations,
                picture=picture,
                as_json=as_json,
            )
        )


def run_account(options: AccountOptions) -> None:
    """Measure, read or predict; draw and print. Raises StepgraphError where a model, trace or option cannot work."""
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.platforms import platform_for

    given = [name for name in ("model", "predict", "trace") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"account: {' and '.join(given)} are given; give one of them")
    if options.picture is not None:
        require_picture(options.picture)
    device = default_device(options.device)
    if options.trace is not None or options.predict is not None or device == "cpu":
        _require_no_measurement(options)
    if options.trace is not None:
        result = _from_trace(options.trace, options.picture)
    elif options.predict is not None or device == "cpu":
        if options.picture is not None:
            raise ConfigError("account: a picture shows a timeline, and there is none without a GPU or --trace")
        result = _predict(options)
        if options.predict is None:
            result = replace(result, notes=[NO_GPU, *result.notes])
    else:
        platform_for(device)  # refuses a device that is not there
        result = _measure(options, device)
    show(result, as_json=options.as_json)


def _require_no_measurement(options: AccountOptions) -> None:
    """Raises ConfigError: an option of a measurement, where there is none."""
    from stepgraph.runtime.errors import ConfigError

    given = [f"--{name}" for name in ("rows", "context", "operations") if getattr(options, name) is not None]
    if not given:
        return
    why = (
        "the steps of a trace have run already"
        if options.trace is not None
        else "the arithmetic is of one row and of reading the weights, which rows, context and kernels do not change"
    )
    raise ConfigError(f"account: {' and '.join(given)}: only a measurement on a GPU takes this; {why}; leave it out")


def _predict(options: AccountOptions) -> Result:
    from stepgraph.cli.plan import model_config
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.measure.cards import CARDS
    from stepgraph.measure.predict import prediction_result

    name = options.predict or options.model
    config = model_config(name or str(demo_model_path()))
    return prediction_result(name or "the demo model", config, CARDS[options.gpu], options.tp)


def _from_trace(path: Path, picture: Path | None) -> Result:
    from stepgraph.measure.account import Accounted
    from stepgraph.measure.account_result import account_result, draw
    from stepgraph.measure.trace.kineto import read_trace
    from stepgraph.measure.trace.steps import split_steps
    from stepgraph.measure.trace.waterfall import waterfall

    steps = [waterfall(step) for step in split_steps(read_trace(path))]
    what = f"{len(steps)} {'step' if len(steps) == 1 else 'steps'} in {path}"
    found = [Accounted("trace", steps)]
    if picture is not None:
        draw(picture, found, None, what)
    return account_result(what, found)


def _measure(options: AccountOptions, device: str) -> Result:
    from stepgraph.measure.account_result import account_result, draw
    from stepgraph.measure.decode import load_model
    from stepgraph.measure.decode_account import account_decode
    from stepgraph.runtime.errors import ConfigError

    rows = 1 if options.rows is None else options.rows
    context = 512 if options.context is None else options.context
    if min(rows, context) < 1:
        raise ConfigError(f"{rows} rows at a context of {context}: both start at 1")
    model = load_model(options.model, device=device, max_len=context + 1, operations=options.operations)
    name = options.model or "the demo model"
    done = account_decode(model, name, rows=rows, context=context)
    if options.picture is not None:
        draw(options.picture, done.found, done.floor, done.what)
    result = account_result(done.what, done.found, floor=done.floor, check=done.check)
    return replace(result, more={**result.more, "limits": done.limits})
