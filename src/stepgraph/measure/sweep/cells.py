"""What a sweep measures: one cell for each combination of what was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from stepgraph.engine.graphs import Graphs
from stepgraph.ops.attention.select import BACKENDS
from stepgraph.ops.operations import OPERATION_SETS
from stepgraph.runtime.config import Compile
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST

EAGER = ("disabled", "NONE")
"""Choices of graphs that capture none."""


@dataclass(frozen=True)
class Work:
    """What is the same for all cells.

    model: as `measure.decode.load_model` takes it. context: tokens that each row attends to. steps: timed ones, for
    each of the clocks.
    """

    model: str | None
    device: str
    context: int
    steps: int

    def __post_init__(self) -> None:
        if self.context < 1 or self.steps < 2:
            raise ConfigError(
                f"sweep: {self.steps} steps at a context of {self.context} tokens; it takes 2 steps and 1 token"
            )


@dataclass(frozen=True)
class Cell:
    """One configuration. attention, operations: None is the device's own. rows: requests that decode at once.
    compile: as in `GraphConfig`."""

    graphs: Graphs
    attention: str | None
    operations: str | None
    rows: int
    compile: str = Compile.OFF.value

    def __str__(self) -> str:
        parts = (compiled_graphs(self.graphs, self.compile), self.attention, self.operations, f"rows {self.rows}")
        return ", ".join(filter(None, parts))


Key = tuple[Work, Cell]
"""What a row of a sweep's file is found by."""


def compiled_graphs(graphs: str, compile: str) -> str:
    """Graphs as a table names them, with what compiles the step."""
    return graphs if compile == Compile.OFF else f"{graphs} + {compile}"


def make_cells(
    graphs: Sequence[str],
    attention: Sequence[str | None] = (None,),
    operations: Sequence[str | None] = (None,),
    rows: Sequence[int] = (1,),
    compile: Sequence[str] = (Compile.OFF.value,),
) -> list[Cell]:
    """Every combination once. Those of one compile mode are together, for each has a process of its own, and in it
    those with the same operations, with which a model is loaded.

    Raises:
        ConfigError: nothing to choose from, a name that the engine does not know, or a number of rows out of range.
    """
    lists = {"graphs": graphs, "attention": attention, "operations": operations, "rows": rows, "compile": compile}
    for name, choices in lists.items():
        if not choices:
            raise ConfigError(f"sweep: --{name} is empty; name at least one")
    names = {
        "graphs": (graphs, get_args(Graphs)),
        "compile": (compile, tuple(Compile)),
        "attention": (attention, BACKENDS),
        "operations": (operations, OPERATION_SETS),
    }
    for name, (asked, known) in names.items():
        for choice in asked:
            if choice is not None and choice not in known:
                raise ConfigError(f"sweep: {name} {choice!r} is not one of {', '.join(known)}")
    for count in rows:
        if not 1 <= count <= LARGEST:
            raise ConfigError(f"sweep: {count} rows; between 1 and {LARGEST} can decode at once")
    made = [
        Cell(choice, backend, pieces, count, compiler)  # type: ignore[arg-type]
        for compiler, pieces, backend, choice, count in itertools.product(compile, operations, attention, graphs, rows)
    ]
    return list(dict.fromkeys(made))


def label(work: Work, cell: Cell) -> dict[str, Any]:
    """The part of a row that says what was asked for."""
    return {"work": asdict(work), "cell": asdict(cell)}


def key_of(row: dict[str, Any]) -> Key:
    """Raises KeyError, TypeError or ValueError where the row is none of a sweep."""
    return Work(**row["work"]), Cell(**row["cell"])
