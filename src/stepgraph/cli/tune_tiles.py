"""`stepgraph tune tiles`: measure the tiles of the fused projections, and write them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepgraph.cli.options import Json, not_empty, one_line_errors

if TYPE_CHECKING:
    from stepgraph.engine.config import ModelConfig


def tiles_command(
    model: Annotated[
        str,
        typer.Argument(help="A shape such as llama-3-8b, a Hugging Face directory or a GGUF file.", callback=not_empty),
    ],
    rows: Annotated[str, typer.Option(help="Numbers of rows to measure, of 1, 2, 4, 8, 16, 32 and 64.")] = "1,2,4,8,16",
    tp: Annotated[int, typer.Option(help="For one rank's part of the model, of so many.", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="Begin nothing after so many; the likeliest tiles come first.")] = 90,
    out: Annotated[
        Path | None, typer.Option(help="The file to write or add to. Default: the package's own for this device.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest tile of each fused projection on this device. Nothing is tuned while serving."""
    with one_line_errors():
        tune_tiles(model=model, rows=rows, tp=tp, seconds=seconds, out=out, as_json=as_json)


def tune_tiles(*, model: str, rows: str, tp: int, seconds: float, out: Path | None, as_json: bool) -> None:
    """Measure, print, write. Raises StepgraphError where there is no CUDA device, or an option cannot work."""
    import torch

    from stepgraph.cli.console import ProgressBar
    from stepgraph.cli.plan import model_config
    from stepgraph.measure.show import show
    from stepgraph.ops.fused.tiling import load_tiles, package_file
    from stepgraph.ops.operations import choose_operations
    from stepgraph.runtime.errors import ConfigError
    from stepgraph.runtime.whole_file import write_whole

    config, counts = model_config(model), _rows(rows)
    name = model if tp == 1 else f"{model}, one of {tp} ranks"
    config = _part(config, tp)
    if not torch.cuda.is_available():
        raise ConfigError("tune tiles: tiles are measured on a CUDA device; there is none")
    choose_operations("fused", "cuda")  # refuses where triton is missing, which what follows imports
    from stepgraph.measure.tune import tune

    device = torch.cuda.get_device_name()
    path = package_file(device) if out is None else out
    tiles = load_tiles(device, path if path.exists() else None)
    with ProgressBar(quiet=as_json) as progress:
        choices, result = tune(name, config, counts, seconds, progress)
    show(result, as_json=as_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tiles.updated(choices).to_json(device), indent=1) + "\n")
    typer.echo(f"{len(choices)} choices in {path}", err=True)


def _part(config: ModelConfig, tp: int) -> ModelConfig:
    """What each of so many ranks has, as a model of its own.

    Raises:
        ConfigError: parts that are not the same for all ranks, whose tiles would be one rank's only.
    """
    from stepgraph.engine.parallel.shard import Shard
    from stepgraph.runtime.errors import ConfigError

    shards = [Shard(config, rank, tp) for rank in range(tp)]
    parts = {
        "KV heads": [len(shard.kv_heads) for shard in shards],
        "heads": [len(shard.heads) for shard in shards],
        "inner size": [len(shard.inner) for shard in shards],
        "vocabulary": [len(shard.vocab) for shard in shards],
    }
    uneven = [f"{name} {', '.join(map(str, sizes))}" for name, sizes in parts.items() if len(set(sizes)) > 1]
    if uneven:
        raise ConfigError(
            f"tune tiles: --tp {tp} gives ranks parts of other sizes ({'; '.join(uneven)}), and tiles are measured for "
            f"one; use a number of ranks that divides them"
        )
    return shards[0].alone


def _rows(text: str) -> list[int]:
    from stepgraph.ops.fused.tiling import ROWS
    from stepgraph.runtime.errors import ConfigError

    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or not set(counts) <= set(ROWS):
        raise ConfigError(f"tune tiles: rows {text!r} must be some of {', '.join(map(str, ROWS))}")
    return counts
