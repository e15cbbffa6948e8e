"""How a projection is cut into programs: data per device and shape, of `stepgraph tune tiles`, never of run time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepgraph.runtime.errors import ConfigError

OPERATIONS = ("qkv", "attention_out", "gate_up", "down", "lm_head")
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows that tiles are measured for; a batch takes those of the next larger number that is there, up to four times its
own."""

CUDA_COLUMNS = 64
"""Columns that a warp of the CUDA kernel reads at a time."""

_UNMEASURED_ROWS = 16  # up to which a shape without measurements is fused
_HALF_A_MULTIPROCESSOR = 112 << 10  # bytes of its shared memory


@dataclass(frozen=True)
class Tile:
    """outputs: rows of the weight that a program owns. columns: of each that it reads at a time. All powers of two.

    stages: 1 reads a tile when it is needed; with more, that many less one are on their way to shared memory.
    kernel: "triton", or "cuda": then a warp reads 64 columns of at least 16 outputs at a time, and `stages` of those
        are on their way.
    """

    outputs: int
    columns: int
    warps: int
    stages: int = 1
    kernel: str = "triton"

    def __post_init__(self) -> None:
        sizes = (self.outputs, self.columns, self.warps)
        if any(size < 1 or size & (size - 1) for size in sizes) or self.outputs < 2 or self.stages < 1:
            raise ConfigError(f"tile: sizes must be powers of two, at least 2 outputs and 1 stage, got {self}")
        if self.kernel not in ("triton", "cuda"):
            raise ConfigError(f"tile: kernel {self.kernel!r} is neither triton nor cuda")
        if self.kernel == "cuda" and (self.outputs < 16 or self.columns != CUDA_COLUMNS or self.stages < 2):
            raise ConfigError(f"tile: the CUDA kernel takes 16 outputs, 64 columns, 2 stages or more, got {self}")


@dataclass(frozen=True)
class Choice:
    """What one projection does for up to `rows` rows.

    out, width: the weight is [out, width]. tile: None where the library's projection, with the rest beside it, is
    faster. us: microseconds of the step that it was measured in, and library_us of the same step with the library's in
    its place, where they were measured. source: of them.
    """

    operation: str
    out: int
    width: int
    rows: int
    tile: Tile | None
    source: str
    us: float | None = None
    library_us: float | None = None


class Tiles:
    """The choices of one device."""

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        self.choices = {(one.operation, one.out, one.width, one.rows): one for one in choices}

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        """For a batch of so many rows; what the rules of `unmeasured` say where nothing was measured."""
        for size in ROWS:
            if rows <= size <= 4 * rows and (found := self.choices.get((operation, out, width, size))) is not None:
                return found
        return unmeasured(operation, out, width, rows)

    def to_json(self, device: str) -> dict[str, Any]:
        ordered = sorted(self.choices.values(), key=lambda c: (c.out * c.width, OPERATIONS.index(c.operation), c.rows))
        return {"device": device, "choices": [asdict(one) for one in ordered]}

    def updated(self, choices: Iterable[Choice]) -> Tiles:
        """These, and `choices` in place of those for the same batches."""
        return Tiles([*self.choices.values(), *choices])


class ChosenTiles(Tiles):
    """A tile for each projection of any shape and batch, to measure it; None: the library's."""

    def __init__(self, tiles: Mapping[str, Tile | None]) -> None:
        super().__init__()
        self._tiles = tiles

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        return Choice(operation, out, width, rows, self._tiles[operation], "chosen")


class OneTile(ChosenTiles):
    """The same for all of them."""

    def __init__(self, tile: Tile | None) -> None:
        super().__init__(dict.fromkeys(OPERATIONS, tile))


def unmeasured(operation: str, out: int, width: int, rows: int) -> Choice:
    """Fused up to 16 rows. As deep a ring as lets two programs onto a multiprocessor of Hopper's: that much of a weight
    arrives while the kernel in front ends."""
    if rows > _UNMEASURED_ROWS:
        return Choice(operation, out, width, rows, None, "not measured")
    warps, outputs = 8, 16
    stage = warps * CUDA_COLUMNS * 2 * (outputs + padded(rows) + 1)
    tile = Tile(outputs, CUDA_COLUMNS, warps, _HALF_A_MULTIPROCESSOR // stage, "cuda")
    return Choice(operation, out, width, rows, tile, "not measured")


def padded(rows: int) -> int:
    """The next power of two, which the CUDA kernel has room for."""
    return 1 << (rows - 1).bit_length()


def by_triton(out: int, width: int, rows: int) -> Tile:
    """A tile for any shape, and for where the CUDA kernel does not work."""
    fitting = max(16, 1 << (width - 1).bit_length())
    if rows > 1:
        return Tile(16 if out <= 8192 else 32, min(256, fitting), 4, stages=3)
    columns = min(1024, fitting)
    return Tile(8 if out <= 4096 else 4 if out <= 8192 else 2, columns, max(1, columns // 256))


def load_tiles(device: str, path: Path | None = None) -> Tiles:
    """The choices for a device by its name; none where it has no file. path: another file than the package's.

    Raises:
        ConfigError: the file cannot be read or holds no choices.
    """
    source = package_file(device) if path is None else path
    if path is None and not source.is_file():
        return Tiles()
    try:
        fields = json.loads(source.read_text(encoding="utf-8"))
        return Tiles(_choice(one) for one in fields["choices"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"tiles: {source} cannot be read: {error}; write it anew with stepgraph tune tiles") from None


def package_file(device: str) -> Path:
    """Where the package has the tiles of a device: `NVIDIA H200`'s in nvidia_h200.json."""
    name = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"
    return Path(str(files("stepgraph.ops.fused").joinpath("tiles", name)))


def _choice(fields: Mapping[str, Any]) -> Choice:
    if fields["operation"] not in OPERATIONS or fields["rows"] not in ROWS:
        raise ConfigError(f"{fields['operation']!r} for {fields['rows']!r} rows is no choice")
    tile = None if fields["tile"] is None else Tile(**fields["tile"])
    return Choice(**{**fields, "tile": tile})
