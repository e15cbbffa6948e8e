"""`stepgraph tune tiles`: what it refuses without a GPU, and that it tunes on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepgraph.cli.app import app


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tune", "tiles", *arguments])
    assert done.exit_code == 2
    return done.stderr


def test_what_is_wrong_is_told_in_one_line() -> None:
    assert "no directory, no GGUF file and none of the shapes llama-3-8b" in refused("no-such-model")
    assert "must be some of 1, 2, 4, 8, 16, 32, 64" in refused("llama-3-8b", "--rows", "1,3")
    assert "must be some of" in refused("llama-3-8b", "--rows", "one")


def test_parts_that_are_not_all_the_same_are_refused() -> None:
    said = refused("llama-3-8b", "--tp", "3")
    for sizes in ("KV heads 2, 3, 3", "heads 8, 12, 12", "inner size 4736, 4800, 4800"):
        assert sizes in said
    assert "--tp 3" in said and "vocabulary" not in said  # 3 divides that


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    assert "measured on a CUDA device; there is none" in refused("llama-3-8b")
    assert "measured on a CUDA device; there is none" in refused("llama-3-8b", "--tp", "2")


@pytest.mark.gpu
def test_it_writes_what_was_fastest_and_keeps_the_rest(tmp_path: Path) -> None:
    from stepgraph.ops.fused.tiling import Choice, Tiles, load_tiles

    path = tmp_path / "tiles.json"
    other = Choice("qkv", 1, 1, 1, None, "another shape")
    path.write_text(json.dumps(Tiles([other]).to_json("a device")))
    arguments = ["tune", "tiles", "llama-3.2-1b", "--rows", "1,8", "--seconds", "25", "--out", str(path), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = load_tiles("a device", path).choices
    assert other in found.values()
    measured = [one for one in found.values() if one.us is not None]
    assert {one.operation for one in measured if one.rows == 1} == {
        "qkv",
        "attention_out",
        "gate_up",
        "down",
        "lm_head",
    }
    assert all(one.us <= one.library_us for one in measured)
