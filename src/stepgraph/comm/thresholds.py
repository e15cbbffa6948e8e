"""Up to which size which algorithm is the fastest: tables as data, by device and world size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepgraph.comm.errors import CommError
from stepgraph.runtime.whole_file import write_whole


@dataclass(frozen=True)
class Thresholds:
    """Largest messages, in bytes: of push, of one-shot pull, of two-shot pull; above it the library. In this order.

    Two that are equal leave out the algorithm of the second. multicast: the smallest and the largest message that it
    would take before two-shot pull; None: none.

    Raises:
        CommError: sizes that are negative or in another order.
    """

    push: int
    pull: int
    two_shot: int
    multicast: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        sizes = (0, self.push, self.pull, self.two_shot)
        if list(sizes) != sorted(sizes):
            raise CommError(f"thresholds: push <= pull <= two_shot, and none negative; got {asdict(self)}")
        if self.multicast is not None and not 0 <= self.multicast[0] <= self.multicast[1]:
            raise CommError(f"thresholds: multicast {self.multicast} is no range of sizes")


@dataclass(frozen=True)
class Table:
    """The thresholds of one device and world size, and where they come from."""

    device: str
    world: int
    captured: Thresholds
    eager: Thresholds
    source: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def table_name(device: str, world: int) -> str:
    """The file that holds a table: the device's name in small letters, then the ranks."""
    words = "".join(letter if letter.isalnum() else " " for letter in device.lower()).split()
    return f"{'_'.join(words)}_x{world}.json"


def load_table(device: str, world: int, compute_capability: tuple[int, int], folder: Path | None = None) -> Table:
    """The tuned table of a device; where there is none, the published one of its generation.

    device: torch's name of it. folder: where it must lie, instead of in the package.

    Raises:
        CommError: a file that is not in the folder, or cannot be read; says which, and why.
    """
    name = table_name(device, world)
    packaged = files("stepgraph.comm.tables")
    if folder is not None:
        tables = read_tables(folder, world)
        if name not in tables:
            raise CommError(f"tables: {folder / name} does not exist; {_command(folder, world)} writes it")
        return tables[name]
    if packaged.joinpath(name).is_file():
        return read_table(packaged.joinpath(name).read_text(encoding="utf-8"), name)
    published = json.loads(packaged.joinpath("published.json").read_text(encoding="utf-8"))
    generation = f"sm{compute_capability[0]}{compute_capability[1]}"
    rows = published["tables"].get(generation, {})
    row = rows.get(str(world), published["others"])
    return _table({"device": device, "world": world, "source": published["source"], **row}, "published.json")


def read_tables(folder: Path, world: int) -> dict[str, Table]:
    """A folder's tables for so many ranks, of whatever device, by file.

    Raises:
        CommError: there is none, or one that is damaged.
    """
    paths = sorted(folder.glob(f"*_x{world}.json"))
    if not paths:
        raise CommError(f"tables: {folder} has none for {world} ranks; {_command(folder, world)} writes one")
    return {path.name: read_table(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def read_table(text: str, where: str) -> Table:
    """A table from JSON, as `as_dict` gives it. Raises CommError: not one; names `where` and what is wrong."""
    try:
        return _table(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise CommError(f"{where} is not JSON: {error}") from None


def write_table(table: Table, folder: Path) -> Path:
    """Write a table where `load_table` finds it; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / table_name(table.device, table.world)
    write_whole(path, json.dumps(table.as_dict(), indent=2) + "\n")
    return path


def _command(folder: Path, world: int) -> str:
    return f"on the GPUs that it is for, `stepgraph tune allreduce --tp {world} --out {folder}`"


def _table(raw: Mapping[str, Any], where: str) -> Table:
    try:
        captured, eager = (_thresholds(raw[name]) for name in ("captured", "eager"))
        return Table(str(raw["device"]), int(raw["world"]), captured, eager, str(raw["source"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CommError(f"{where}: a table has device, world, source, captured and eager: {error!r}") from None


def _thresholds(raw: Mapping[str, Any]) -> Thresholds:
    multicast = raw.get("multicast")
    bounds = None if multicast is None else (int(multicast[0]), int(multicast[1]))
    return Thresholds(int(raw["push"]), int(raw["pull"]), int(raw["two_shot"]), bounds)
