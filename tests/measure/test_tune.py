"""What `tune` makes of timings: the fastest tile that is right, or the library's."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")  # the set that is tuned needs it

from stepgraph.measure import tune as module
from stepgraph.measure.tune import Timing, candidates, tile_name
from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Tile

SMALL, LARGE = Tile(4, 1024, 4), Tile(16, 64, 8, 3, "cuda")


class FakeProjections:
    def size(self, operation: str) -> tuple[int, int]:
        return (64, 128)

    def weight_bytes(self, operation: str) -> int:
        return 64 * 128 * 2


def chosen(*timings: Timing) -> list:
    return list(module._choices(FakeProjections(), timings, "a test"))  # type: ignore[arg-type]


def test_the_fastest_is_taken_unless_it_is_wrong() -> None:
    library, right = Timing("qkv", 1, None, 9.0, 0.0), Timing("qkv", 1, SMALL, 8.0, 1e-3)
    wrong = Timing("qkv", 1, LARGE, 1.0, 0.5)
    nan = Timing("qkv", 1, LARGE, 1.0, float("nan"))
    (choice,) = chosen(library, right, wrong, nan)
    assert (choice.tile, choice.us, choice.library_us, choice.out, choice.width) == (SMALL, 8.0, 9.0, 64, 128)


def test_the_library_is_taken_where_it_is_faster() -> None:
    (choice,) = chosen(Timing("down", 64, None, 7.0, 0.0), Timing("down", 64, SMALL, 8.0, 0.0))
    assert choice.tile is None and choice.us == choice.library_us == 7.0


def test_what_there_was_no_time_for_is_not_chosen() -> None:
    assert not chosen(Timing("down", 2, None, 7.0, 0.0))


def test_all_is_planned_once_the_library_first() -> None:
    plan = list(module._plan([1, 8, 64]))
    assert len(plan) == len(set(plan)) == sum(len(OPERATIONS) * (1 + len(candidates(rows))) for rows in (1, 8, 64))
    assert all(tile is None for _, _, tile in plan[: 3 * len(OPERATIONS)])
    assert all(len(set(candidates(rows))) == len(candidates(rows)) for rows in ROWS)


def test_the_table_says_what_was_timed() -> None:
    timings = [Timing("qkv", 1, None, 2.0, 0.0), Timing("qkv", 1, LARGE, 1.0, 1e-3)]
    result = module._result("a shape", FakeProjections(), timings, chosen(*timings), 10)  # type: ignore[arg-type]
    assert [row[2] for row in result.tables[0].rows] == [tile_name(LARGE), "library"]
    assert result.tables[0].rows[0][4] == pytest.approx(64 * 128 * 2 / 1e-6 / 1e12)
    assert result.notes[0] == "2 of 10 timed." and "library's 2.00" in result.notes[1]
