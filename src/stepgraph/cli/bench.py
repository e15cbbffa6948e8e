"""`stepgraph bench`: time per output token with graphs on and off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.engine.graphs import Graphs
    from stepgraph.measure.result import Result


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line; None where the default depends on the machine or the model."""

    model: str | None = None
    rows: int = 1
    prompt: int = 512
    tokens: int = 64
    rounds: int = 4
    graphs: Graphs = "FULL_DECODE_ONLY"
    device: str | None = None
    attention: str | None = None
    operations: str | None = None
    picture: Path | None = None
    as_json: bool = False


def run_bench(options: BenchOptions) -> None:
    """Measure and print. Raises StepgraphError where the model or an option cannot work."""
    from stepgraph.measure.bench import Workload, bench
    from stepgraph.measure.decode import load_model
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.platforms import platform_for

    if options.picture is not None:
        require_picture(options.picture)
    if options.graphs in ("disabled", "NONE"):
        raise ConfigError(f"bench: --graphs {options.graphs} leaves nothing to compare; choose full or another mode")
    workload = Workload(options.rows, options.prompt, options.tokens, options.rounds)
    device = default_device(options.device)
    platform_for(device)  # refuses a device that is not there
    model = load_model(options.model, device=device, max_len=workload.longest, operations=options.operations)
    result = bench(model, workload, options.graphs, options.attention)
    if options.picture is not None:
        draw(options.picture, result)
    show(result, as_json=options.as_json)


def draw(path: Path, result: Result) -> None:
    """A PNG: the share of steps that took at most so long, a line for each figure in ms.

    Raises:
        ConfigError: it cannot be written.
    """
    from stepgraph.measure.picture import new_picture, save_picture

    picture = new_picture(9, 5)
    axes = picture.subplots()
    for figure in result.figures:
        if figure.unit == "ms":
            samples = sorted(figure.samples)
            shares = [(index + 1) / len(samples) for index in range(len(samples))]
            axes.step(samples, shares, where="post", label=figure.name)
    axes.set(xlabel="ms", ylabel="share of the steps", title="a decode step takes at most", xlim=(0, None))
    axes.legend()
    save_picture(picture, path)
