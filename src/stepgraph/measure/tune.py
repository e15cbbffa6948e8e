"""Which tile each fused projection of a shape takes, measured on this device: what `ops/fused/tiles` holds.

A projection is measured where it stands, in a decode step: what it costs is as much how soon its weights arrive while
the kernel in front ends as how fast it reads them. By itself another tile may be the fastest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from triton.runtime.errors import OutOfResources

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.random_model import random_model
from stepgraph.measure.clock import device_ms
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.graph import CallGraph
from stepgraph.measure.projections import Projections
from stepgraph.measure.result import Result, Rows
from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import CUDA_COLUMNS, OPERATIONS, Choice, ChosenTiles, Tile, by_triton
from stepgraph.runtime import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.progress import Progress

_REPLAYS = 20
_CONTEXT = 512
_LAYER_BYTES = 3 << 29  # of the weights of all layers of the step: many times the L2 cache
_TOO_FAR = 2e-2  # relative error against the library's, above which a tile is not taken
_TURNS, _TRIED_AGAIN = 2, 4  # over all projections; of each, the best of the turn before

_FEW_ROWS = [  # the first is what all begin with
    Tile(16, CUDA_COLUMNS, 8, 6, "cuda"),
    Tile(16, CUDA_COLUMNS, 8, 4, "cuda"),
    Tile(16, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(16, CUDA_COLUMNS, 8, 8, "cuda"),
    Tile(16, CUDA_COLUMNS, 16, 2, "cuda"),
    Tile(16, CUDA_COLUMNS, 16, 3, "cuda"),
    Tile(16, CUDA_COLUMNS, 16, 6, "cuda"),
    Tile(16, CUDA_COLUMNS, 4, 8, "cuda"),
    Tile(16, CUDA_COLUMNS, 4, 12, "cuda"),
    Tile(32, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(32, CUDA_COLUMNS, 8, 6, "cuda"),
    Tile(32, CUDA_COLUMNS, 16, 2, "cuda"),
    Tile(32, CUDA_COLUMNS, 16, 3, "cuda"),
]
_MORE_ROWS = [
    Tile(16, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(32, CUDA_COLUMNS, 8, 2, "cuda"),
    Tile(32, CUDA_COLUMNS, 8, 4, "cuda"),
    Tile(32, CUDA_COLUMNS, 4, 4, "cuda"),
    Tile(32, CUDA_COLUMNS, 4, 8, "cuda"),
    Tile(64, CUDA_COLUMNS, 4, 2, "cuda"),
    Tile(64, CUDA_COLUMNS, 8, 2, "cuda"),
    Tile(64, CUDA_COLUMNS, 8, 3, "cuda"),
    Tile(16, CUDA_COLUMNS, 8, 4, "cuda"),
    Tile(64, 128, 4, 3),
]

Chosen = Mapping[str, Tile | None]
"""By projection; None: the library's."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a step that has this tile, and of all others the best that were known. tile: None is the
    library's. error: of this projection alone, relative to the library's.
    """

    operation: str
    rows: int
    tile: Tile | None
    us: float
    error: float


def candidates(rows: int) -> Sequence[Tile]:
    return _FEW_ROWS if rows <= 8 else _MORE_ROWS


def tune(
    name: str, config: ModelConfig, rows: Sequence[int], seconds: float, progress: Progress | None = None
) -> tuple[list[Choice], Result]:
    """The fastest tile for each projection and number of rows, or the library's, in bfloat16; and all that was timed.

    seconds: nothing is begun after so many, shared by the numbers of rows. What could not be measured by then is in no
    choice.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune: tiles are measured on a CUDA device; there is none")
    started = time.perf_counter()
    projections = Projections(config, torch.device("cuda"), torch.bfloat16)
    ahead = [(operation, count, tile) for count in rows for tile in candidates(count) for operation in OPERATIONS]
    projections.compile_ahead(ahead)
    timings: list[Timing] = []
    choices: list[Choice] = []
    source = f"stepgraph tune tiles, {torch.cuda.get_device_name()}"
    for done, count in enumerate(rows):
        if progress is not None:
            progress(done, len(rows), f"{count} rows")
        left = seconds - (time.perf_counter() - started)
        search = _Search(projections, _Step(config, count), count, time.perf_counter() + left / (len(rows) - done))
        choices += search.run(source)
        timings += search.timings
    return choices, _result(name, timings, choices)


class _Step:
    """Some layers of the shape and its LM head, at one number of rows."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer = 2 * config.hidden_size * (heads + 3 * config.intermediate_size)
        fewer = replace(config, num_layers=min(config.num_layers, max(2, -(-_LAYER_BYTES // layer))))
        self._model = random_model(
            fewer, device="cuda", dtype=torch.bfloat16, max_positions=_CONTEXT + 1, operations="fused"
        )
        self._decode = DecodeRows(self._model, GraphConfig.preset("NONE"), rows=rows, context=_CONTEXT)
        self._decode.stage(rows)
        made = self._model.operations
        assert isinstance(made, FusedOperations)
        self._made = made

    @torch.inference_mode()
    def us(self, chosen: Chosen) -> float:
        """The median of a graph's replays."""
        self._model.operations = self._made.with_tiles(ChosenTiles(chosen))
        return statistics.median(device_ms(CallGraph(self._decode.logits).replay, _REPLAYS)) * 1e3


class _Search:
    """One projection after the other takes what makes the step the shortest; then all once more."""

    def __init__(self, projections: Projections, step: _Step, rows: int, deadline: float) -> None:
        self._projections, self._step, self._rows, self._deadline = projections, step, rows, deadline
        self.timings: list[Timing] = []

    def run(self, source: str) -> list[Choice]:
        order = sorted(OPERATIONS, key=self._projections.weight_bytes, reverse=True)
        tried: dict[str, list[Tile | None]] = {}
        chosen: dict[str, Tile | None] = {}
        for operation in order:
            working = [tile for tile in candidates(self._rows) if self._works(operation, tile)]
            out, width = self._projections.size(operation)
            tried[operation] = [*working, None]
            chosen[operation] = working[0] if working else by_triton(out, width, self._rows)
        for _ in range(_TURNS):
            for operation in order:
                found = dict(self._measure(operation, chosen, tried[operation]))
                if not found:
                    return list(self._choices(chosen, source))
                best = sorted(found, key=lambda tile: found[tile])
                chosen[operation] = best[0]
                tried[operation] = best[:_TRIED_AGAIN]
        return list(self._choices(chosen, source))

    def _works(self, operation: str, tile: Tile) -> bool:
        return self._projections.works(operation, self._rows, tile)

    def _measure(
        self, operation: str, chosen: Chosen, tried: Sequence[Tile | None]
    ) -> Iterator[tuple[Tile | None, float]]:
        """The step's microseconds with each of `tried` that is right; none after the deadline."""
        for tile in tried:
            if time.perf_counter() > self._deadline:
                return
            error = self._projections.error(operation, self._rows, tile)
            with suppress(OutOfResources):  # a tile that this device has no room for
                us = self._step.us({**chosen, operation: tile})
                self.timings.append(Timing(operation, self._rows, tile, us, error))
                if error <= _TOO_FAR:
                    yield tile, us

    def _choices(self, chosen: Chosen, source: str) -> Iterator[Choice]:
        for operation in OPERATIONS:
            mine = [one for one in self.timings if one.operation == operation]
            taken = [one.us for one in mine if one.tile == chosen[operation]]
            library = [one.us for one in mine if one.tile is None]
            if taken and library:
                out, width = self._projections.size(operation)
                sizes = operation, out, width, self._rows
                yield Choice(*sizes, chosen[operation], source, taken[-1], library[-1])


def _result(name: str, timings: Sequence[Timing], choices: Sequence[Choice]) -> Result:
    rows = [
        [one.operation, one.rows, tile_name(one.tile), one.us, one.error]
        for one in sorted(timings, key=lambda t: (t.rows, OPERATIONS.index(t.operation), t.us))
    ]
    columns = ["operation", "rows", "tile", "µs", "error"]
    told = {
        "operation": "the projection with all that surrounds it: norm, rotary embedding, KV write, SwiGLU, residual",
        "tile": "outputs of a program x columns at a time, warps, stages; the library's has its own launches beside it",
        "µs": f"of a step of some layers and the LM head at a context of {_CONTEXT}: the median of a graph's replays, "
        "the other projections having the best tiles known by then",
        "error": f"of the projection, relative to the library's; above {_TOO_FAR} a tile is not taken",
    }
    return Result(
        name="tiles",
        definition=f"Tiles of the fused projections of {name} in bfloat16.",
        tables=[Rows("all that was timed, the fastest first", columns, rows, told)],
        notes=[f"{len(timings)} timed.", *(_told(one) for one in choices)],
    )


def _told(one: Choice) -> str:
    library = f", the library's {one.library_us:.2f}" if one.library_us is not None else ""
    return f"{one.operation}, {one.rows} rows: {tile_name(one.tile)}, a step of {one.us:.2f} µs{library}"


def tile_name(tile: Tile | None) -> str:
    if tile is None:
        return "library"
    return f"{tile.kernel} {tile.outputs}x{tile.columns}, {tile.warps} warps, {tile.stages} stages"
