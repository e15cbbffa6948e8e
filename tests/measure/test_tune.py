"""What `tune` makes of timings: in turns over the projections, the fastest tile that is right, or the library's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("triton")  # the set that is tuned needs it

from stepgraph.measure import tune as module
from stepgraph.measure.tune import Chosen, Timing, candidates, tile_name
from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Choice, Tile

FIRST, SECOND, THIRD = candidates(1)[:3]


class FakeProjections:
    wrong: tuple[Tile, ...] = ()
    missing: tuple[Tile, ...] = ()

    def size(self, operation: str) -> tuple[int, int]:
        return (64, 128)

    def weight_bytes(self, operation: str) -> int:
        return 1000 - OPERATIONS.index(operation)

    def works(self, operation: str, rows: int, tile: Tile) -> bool:
        return tile not in self.missing

    def error(self, operation: str, rows: int, tile: Tile | None) -> float:
        return float("nan") if tile in self.wrong else 1e-3


class FakeStep:
    def __init__(self, us: Callable[[Chosen], float]) -> None:
        self.us = us


def searched(
    us: Callable[[Chosen], float], *, seconds: float = 60, wrong: tuple[Tile, ...] = (), missing: tuple[Tile, ...] = ()
) -> dict[str, Choice]:
    projections = FakeProjections()
    projections.wrong, projections.missing = wrong, missing
    search = module._Search(projections, FakeStep(us), 1, time.perf_counter() + seconds)  # type: ignore[arg-type]
    return {one.operation: one for one in search.run("a test")}


def cost(**tiles: Tile | None) -> Callable[[Chosen], float]:
    """100 µs, and one more for each projection that has not the tile it is best with."""
    return lambda chosen: 100 + sum(chosen[operation] != tiles.get(operation, FIRST) for operation in OPERATIONS)


def test_each_projection_takes_what_makes_the_step_the_shortest() -> None:
    found = searched(cost(down=SECOND, qkv=None))
    assert {name: one.tile for name, one in found.items()} == {
        "qkv": None, "attention_out": FIRST, "gate_up": FIRST, "down": SECOND, "lm_head": FIRST,
    }  # fmt: skip
    down = found["down"]
    assert (down.us, down.library_us, down.out, down.width, down.rows) == (100, 101, 64, 128, 1)
    assert found["qkv"].us == found["qkv"].library_us == 100


def test_what_is_best_beside_others_is_found_in_the_second_turn() -> None:
    """The first projection's best tile is another once the last one has its own."""

    def us(chosen: Chosen) -> float:
        together = chosen["gate_up"] == SECOND and chosen["attention_out"] == SECOND
        return 90 if together else 100 + (chosen["attention_out"] != SECOND) + (chosen["gate_up"] == SECOND) / 2

    found = searched(us)
    assert found["gate_up"].tile == found["attention_out"].tile == SECOND


def test_a_wrong_one_is_not_taken_nor_one_that_does_not_work() -> None:
    found = searched(cost(down=SECOND, qkv=THIRD), wrong=(SECOND,), missing=(THIRD,))
    assert found["down"].tile not in (SECOND, THIRD) and found["qkv"].tile not in (SECOND, THIRD)


def test_what_there_was_no_time_for_is_not_chosen() -> None:
    assert not searched(cost(), seconds=-1)


def test_candidates_differ() -> None:
    assert all(len(set(candidates(rows))) == len(candidates(rows)) for rows in ROWS)


def test_the_table_says_what_was_timed() -> None:
    timings = [Timing("qkv", 1, None, 2.0, 0.0), Timing("qkv", 1, FIRST, 1.0, 1e-3)]
    choices = [Choice("qkv", 64, 128, 1, FIRST, "a test", 1.0, 2.0)]
    result = module._result("a shape", timings, choices)
    assert [row[2] for row in result.tables[0].rows] == [tile_name(FIRST), "library"]
    assert result.notes[0] == "2 timed." and "library's 2.00" in result.notes[1]
