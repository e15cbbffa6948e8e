"""Which tile each fused projection of a shape takes, measured on this device: what `ops/fused/tiles` holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from stepgraph.engine.config import ModelConfig
from stepgraph.measure.clock import device_ms
from stepgraph.measure.projections import Projections
from stepgraph.measure.result import Result, Rows
from stepgraph.measure.stats import quantiles
from stepgraph.ops.fused.tiling import CUDA_COLUMNS, OPERATIONS, Choice, Tile
from stepgraph.runtime.errors import ConfigError

_REPLAYS = 20
_TOO_FAR = 2e-2  # relative error against the library's, above which a tile is not taken

# The likeliest first: what there is no time for is not measured.
_ONE_ROW = [
    Tile(16, CUDA_COLUMNS, 8, 4, "cuda"),
    Tile(4, 1024, 4),
    Tile(2, 1024, 4),
    Tile(16, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(8, 1024, 4),
    Tile(32, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(16, CUDA_COLUMNS, 4, 6, "cuda"),
    Tile(4, 2048, 8),
    Tile(16, CUDA_COLUMNS, 8, 6, "cuda"),
    Tile(16, CUDA_COLUMNS, 16, 2, "cuda"),
    Tile(2, 2048, 8),
]
_FEW_ROWS = [
    Tile(16, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(32, CUDA_COLUMNS, 8, 2, "cuda"),
    Tile(16, CUDA_COLUMNS, 8, 4, "cuda"),
    Tile(32, CUDA_COLUMNS, 4, 4, "cuda"),
    Tile(16, CUDA_COLUMNS, 4, 6, "cuda"),
    Tile(32, 256, 4, 3),
    Tile(64, CUDA_COLUMNS, 4, 2, "cuda"),
    Tile(16, 256, 4, 3),
]
_MANY_ROWS = [Tile(32, CUDA_COLUMNS, 8, 2, "cuda"), Tile(16, CUDA_COLUMNS, 8, 2, "cuda"), Tile(64, 128, 4, 3)]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one projection with all that surrounds it. tile: None is the library's. error: against that."""

    operation: str
    rows: int
    tile: Tile | None
    us: float
    error: float


def candidates(rows: int) -> Sequence[Tile]:
    return _ONE_ROW if rows == 1 else _FEW_ROWS if rows <= 16 else _MANY_ROWS


def tune(
    name: str, config: ModelConfig, rows: Sequence[int], seconds: float, progress: Progress | None = None
) -> tuple[list[Choice], Result]:
    """The fastest tile for each projection and number of rows, or the library's, in bfloat16; and all that was timed.

    seconds: nothing is begun after so many. What could not be measured by then is in no choice.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune: tiles are measured on a CUDA device; there is none")
    started = time.perf_counter()
    projections = Projections(config, torch.device("cuda"), torch.bfloat16)
    plan = list(_plan(rows))
    projections.compile_ahead([(operation, count, tile) for operation, count, tile in plan if tile is not None])
    timings: list[Timing] = []
    for done, (operation, count, tile) in enumerate(plan):
        if time.perf_counter() - started > seconds:
            break
        if progress is not None:
            progress(done, len(plan), f"{operation} of {count}")
        if tile is None or projections.works(operation, count, tile):
            with suppress(OutOfResources):  # a tile that this device has no room for
                timings.append(_timing(projections, operation, count, tile))
    choices = list(_choices(projections, timings, f"stepgraph tune tiles, {torch.cuda.get_device_name()}"))
    return choices, _result(name, projections, timings, choices, len(plan))


def _plan(rows: Sequence[int]) -> Iterator[tuple[str, int, Tile | None]]:
    """The library's of everything, then every projection's likeliest tiles, then the next ones."""
    yield from ((operation, count, None) for count in rows for operation in OPERATIONS)
    for turn in range(max(len(candidates(count)) for count in rows)):
        for count in rows:
            if turn < len(candidates(count)):
                yield from ((operation, count, candidates(count)[turn]) for operation in OPERATIONS)


def _timing(projections: Projections, operation: str, rows: int, tile: Tile | None) -> Timing:
    want = projections.result(operation, rows, None).float()
    got = projections.result(operation, rows, tile).float()
    error = float((got - want).norm() / want.norm())
    graph, launches = projections.graph(operation, rows, tile)
    taken = quantiles([ms * 1e3 / launches for ms in device_ms(graph.replay, _REPLAYS)])
    return Timing(operation, rows, tile, taken["median"], error)


def _choices(projections: Projections, timings: Sequence[Timing], source: str) -> Iterator[Choice]:
    for operation, rows in dict.fromkeys((one.operation, one.rows) for one in timings):
        mine = [one for one in timings if (one.operation, one.rows) == (operation, rows)]
        right = [one for one in mine if one.error <= _TOO_FAR]
        if len(mine) == 1:  # the library's alone: there was no time for more
            continue
        best = min(right, key=lambda one: one.us)
        library = next(one.us for one in mine if one.tile is None)
        out, width = projections.size(operation)
        yield Choice(operation, out, width, rows, best.tile, source, best.us, library)


def _result(
    name: str, projections: Projections, timings: Sequence[Timing], choices: Sequence[Choice], planned: int
) -> Result:
    rows = []
    for one in sorted(timings, key=lambda t: (t.rows, OPERATIONS.index(t.operation), t.us)):
        speed = projections.weight_bytes(one.operation) / one.us / 1e6
        rows.append([one.operation, one.rows, tile_name(one.tile), one.us, speed, one.error])
    columns = ["operation", "rows", "tile", "µs", "TB/s", "error"]
    told = {
        "operation": "the projection with all that surrounds it: norm, rotary embedding, KV write, SwiGLU, residual",
        "tile": "outputs of a program x columns at a time, warps, stages; the library's has its own launches beside it",
        "µs": "of one, the median of graphs of many with different weights, each launched while the last one ends",
        "TB/s": "bytes of the weight over that time",
        "error": f"relative, against the library's; above {_TOO_FAR} a tile is not taken",
    }
    return Result(
        name="tiles",
        definition=f"Tiles of the fused projections of {name} in bfloat16.",
        tables=[Rows("all that was timed, the fastest first", columns, rows, told)],
        notes=[f"{len(timings)} of {planned} timed.", *(_told(one) for one in choices)],
    )


def _told(one: Choice) -> str:
    library = f", the library's {one.library_us:.2f}" if one.library_us is not None else ""
    return f"{one.operation}, {one.rows} rows: {tile_name(one.tile)}, {one.us:.2f} µs{library}"


def tile_name(tile: Tile | None) -> str:
    if tile is None:
        return "library"
    return f"{tile.kernel} {tile.outputs}x{tile.columns}, {tile.warps} warps, {tile.stages} stages"
