"""`stepgraph launch`: what a launch costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepgraph.cli.options import Json, Where, default_device, one_line_errors


def launch_command(
    device: Where = None,
    picture: Annotated[Path | None, typer.Option(help="Draw launches and graphs into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what a kernel's launch costs, and a graph's by its number of nodes, beside published figures."""
    with one_line_errors():
        launch(device=None if device is None else device.value, picture=picture, as_json=as_json)


def launch(*, device: str | None, picture: Path | None, as_json: bool) -> None:
    """Measure, draw, print. Raises StepgraphError for a device that cannot work, or a picture that cannot be drawn."""
    from stepgraph.measure.launch import measure_launch
    from stepgraph.measure.launch_picture import draw_launch
    from stepgraph.measure.picture import require_picture
    from stepgraph.measure.show import show

    if picture is not None:
        require_picture(picture)
    result = measure_launch(default_device(device))
    if picture is not None:
        draw_launch(result, picture)
    show(result, as_json=as_json)
