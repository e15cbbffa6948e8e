"""What a sweep measures: one cell for each combination of what was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from stepgraph.engine.graphs import Graphs
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
    """One configuration. attention, operations: None is the device's own. rows: requests that decode at once."""

    graphs: Graphs
    attention: str | None
    operations: str | None
    rows: int

    def __str__(self) -> str:
        return ", ".join([self.graphs, *filter(None, (self.attention, self.operations)), f"rows {self.rows}"])


Key = tuple[Work, Cell]
"""What a row of a sweep's file is found by."""


def make_cells(
    graphs: Sequence[str],
    attention: Sequence[str | None] = (None,),
    operations: Sequence[str | None] = (None,),
    rows: Sequence[int] = (1,),
) -> list[Cell]:
    """Every combination once, those with the same operations together, for a model is loaded with its operations.

    Raises:
        ConfigError: nothing to choose from, graphs that the engine does not have, or a number of rows out of range.
    """
    for name, choices in (("graphs", graphs), ("attention", attention), ("operations", operations), ("rows", rows)):
        if not choices:
            raise ConfigError(f"sweep: --{name} is empty; name at least one")
    for choice in graphs:
        if choice == "piecewise":
            raise ConfigError(
                "sweep: 'piecewise' graphs are parts of a compiled step, and the engine compiles none yet; "
                "'breakable' has graphs around attention"
            )
        if choice not in get_args(Graphs):
            raise ConfigError(f"sweep: graphs {choice!r} is not one of {', '.join(get_args(Graphs))}")
    for count in rows:
        if not 1 <= count <= LARGEST:
            raise ConfigError(f"sweep: {count} rows; between 1 and {LARGEST} can decode at once")
    made = [
        Cell(choice, backend, pieces, count)  # type: ignore[arg-type]
        for pieces, backend, choice, count in itertools.product(operations, attention, graphs, rows)
    ]
    return list(dict.fromkeys(made))


def label(work: Work, cell: Cell) -> dict[str, Any]:
    """The part of a row that says what was asked for."""
    return {"work": asdict(work), "cell": asdict(cell)}


def key_of(row: dict[str, Any]) -> Key:
    """Raises KeyError, TypeError or ValueError where the row is none of a sweep."""
    return Work(**row["work"]), Cell(**row["cell"])
