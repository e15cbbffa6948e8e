"""Tiles as data: what is chosen, where from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Choice, OneTile, Tile, Tiles, load_tiles, package_file
from stepgraph.runtime import ConfigError

CUDA = Tile(16, 64, 8, 3, "cuda")


def test_a_batch_takes_the_tile_of_the_next_larger_number_of_rows() -> None:
    four, eight = (Choice("down", 64, 128, rows, Tile(16, 128, rows // 4), "a test") for rows in (4, 8))
    tiles = Tiles([four, eight])
    assert [tiles.choose("down", 64, 128, rows) for rows in (1, 3, 4, 5, 8)] == [four, four, four, eight, eight]
    assert Tiles([eight]).choose("down", 64, 128, 1).source == "not measured"
    assert tiles.choose("down", 64, 256, 4).source == "not measured"


def test_without_measurements_small_batches_are_fused() -> None:
    for operation in OPERATIONS:
        for rows in (1, 2, 16):
            assert Tiles().choose(operation, 6144, 4096, rows).tile is not None
        assert Tiles().choose(operation, 6144, 4096, 17).tile is None
        assert Tiles().choose(operation, 6144, 4096, ROWS[-1] + 1).tile is None


def test_without_measurements_two_programs_fit_a_multiprocessor() -> None:
    for rows, stages in ((1, 6), (2, 5), (4, 5), (8, 4), (16, 3)):
        assert Tiles().choose("down", 4096, 14336, rows).tile == Tile(16, 64, 8, stages, "cuda")


def test_measurements_replace_those_of_the_same_batch(tmp_path: Path) -> None:
    old = Tiles([Choice("qkv", 64, 128, 1, None, "old"), Choice("qkv", 64, 128, 2, None, "old")])
    new = old.updated([Choice("qkv", 64, 128, 1, CUDA, "new", 2.5, 3.0)])
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(new.to_json("a device")))
    read = load_tiles("a device", path)
    assert read.choices == new.choices
    assert read.choose("qkv", 64, 128, 1).tile == CUDA and read.choose("qkv", 64, 128, 2).tile is None


def test_one_tile_is_the_same_for_all() -> None:
    assert OneTile(CUDA).choose("lm_head", 1, 1, 100).tile == CUDA
    assert OneTile(None).choose("qkv", 1, 1, 1).tile is None


def test_the_packages_tiles_load_and_say_where_they_are_from() -> None:
    assert package_file("NVIDIA H200").name == "nvidia_h200.json"
    tiles = load_tiles("NVIDIA H200")
    assert tiles.choices and all(one.source for one in tiles.choices.values())
    assert not load_tiles("a device that nobody has").choices


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"choices": [{"operation": "qkv"}]}',
        '{"choices": [{"operation": "x", "out": 1, "width": 1, "rows": 1, "tile": null, "source": ""}]}',
        '{"choices": [{"operation": "qkv", "out": 1, "width": 1, "rows": 3, "tile": null, "source": ""}]}',
    ],
)
def test_a_file_without_choices_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="tiles.json cannot be read.*stepgraph tune tiles"):
        load_tiles("a device", path)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((3, 64, 4), "powers of two"),
        ((1, 64, 4), "at least 2 outputs"),
        ((16, 64, 4, 0), "1 stage"),
        ((16, 64, 4, 2, "magic"), "neither triton nor cuda"),
        ((8, 64, 4, 2, "cuda"), "16 outputs"),
        ((16, 128, 4, 2, "cuda"), "64 columns"),
    ],
)
def test_a_tile_that_cannot_work_is_refused(sizes: tuple, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tile(*sizes)
