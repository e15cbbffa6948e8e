"""`stepgraph bench` from the command line."""

import json
from pathlib import Path

import pytest
from engine.hf import write_checkpoint

from stepgraph.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    model, picture = str(write_checkpoint(tmp_path / "model")), tmp_path / "bench.png"
    capsys.readouterr()  # what transformers tells of writing it
    small = ["--device", "cpu", "--rows", "2", "--prompt", "8", "--tokens", "3", "--rounds", "2"]
    code, out, err = run(capsys, model, *small, "--json", "--picture", str(picture))
    assert (code, err) == (0, "") and picture.stat().st_size > 1000
    found = json.loads(out)
    assert found["resolved"]["graphs"]["steps"] == {"FULL": 3} and len(found["samples"]["eager: per token"]) == 6
    code, out, _ = run(capsys, model, *small)
    assert code == 0 and "eager / graphs" in out and "Without a GPU" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graphs", "disabled"], "nothing to compare"),
        (["--rows", "0"], "all start at 1"),
        (["--rounds", "0"], "all start at 1"),
        (["--picture", "bench.pdf"], "must end in .png"),
        (["llama-3-8b", "--prompt", "9000"], "of context or prompt"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
