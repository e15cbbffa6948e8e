"""`stepgraph sweep` from the command line."""

import json
from pathlib import Path

import pytest
from engine.hf import write_checkpoint

from stepgraph.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_sweep_goes_on_where_it_was_interrupted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, out = str(write_checkpoint(tmp_path / "model")), tmp_path / "sweep.jsonl"
    capsys.readouterr()  # what transformers tells of writing it
    few = [model, "--out", str(out), "--device", "cpu", "--context", "16", "--steps", "3", "--rows", "1,2"]
    code, text, err = run(capsys, *few, "--graphs", "full", "--json")
    assert (code, err) == (0, "") and len(json.loads(text)["cells"]) == 2
    lines = out.read_text().splitlines()
    out.write_text(lines[1] + "\n")  # as a sweep that was killed after its second cell leaves it
    code, text, err = run(capsys, *few, "--graphs", "full,disabled", "--attention", "reference,cuda")
    assert code == 0 and "failed cells" in text and "eager / this" in text
    assert err.startswith(f"sweep: 4 of 8 cells failed; {out} has the reasons") and err.count("\n") == 1
    code, text, err = run(capsys, *few, "--graphs", "full,disabled", "--json")
    found = json.loads(text)
    assert (code, err) == (0, "") and len(found["cells"]) == 4 and len(found["curves"]) == 2
    assert lines[1] in out.read_text().splitlines()


def test_compile_modes_and_graphs_cross(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, out = str(write_checkpoint(tmp_path / "model")), tmp_path / "sweep.jsonl"
    capsys.readouterr()
    few = [model, "--out", str(out), "--device", "cpu", "--context", "16", "--steps", "3", "--rows", "2", "--json"]
    code, text, err = run(capsys, *few, "--compile", "off,aot_eager", "--graphs", "full,piecewise,breakable,disabled")
    cells = json.loads(text)["cells"]
    ran = {(row["cell"]["compile"], row["cell"]["graphs"]): row["failed"] or row["resolved"]["decode"] for row in cells}
    assert code == 0 and "1 of 8 cells failed" in err
    assert "are of a compiled step" in ran.pop(("off", "piecewise"))
    assert ran == {
        ("off", "full"): "full", ("off", "breakable"): "breakable", ("off", "disabled"): "disabled",
        ("aot_eager", "full"): "full", ("aot_eager", "piecewise"): "piecewise",
        ("aot_eager", "breakable"): "piecewise", ("aot_eager", "disabled"): "disabled",
    }  # fmt: skip


def test_a_sweep_without_a_single_figure_ends_with_1(
    demo_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "sweep.jsonl", tmp_path / "sweep.png"
    out.touch()  # as mktemp leaves it
    few = ["--out", str(out), "--device", "cpu", "--steps", "2", "--graphs", "full", "--attention", "cuda"]
    for more in ([], ["--picture", str(picture)]):  # measured, and read from the file
        code, text, err = run(capsys, *few, "--json", *more)
        assert code == 1 and all(cell["failed"] for cell in json.loads(text)["cells"])
        assert err.startswith(f"sweep: all 2 cells failed; {out} has the reasons") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "on"], "compile 'on' is not one of off, inductor, aot_eager"),
        (["--attention", "fast"], "attention 'fast' is not one of cuda, triton, reference"),
        (["--operations", "fast"], "operations 'fast' is not one of fused, unfused, reference"),
        (["--graphs", "fast"], "graphs 'fast' is not one of full"),
        (["--rows", "1,x"], "no list of numbers"),
        (["--picture", "sweep.pdf"], "must end in .png"),
        (["--steps", "1"], "it takes 2 steps"),
        (["nothing-of-that-name"], "none of the shapes"),
        (["/nowhere"], "none of the shapes"),
        (["llama-3-8b", "--context", "9000"], "lower --context"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments, "--out", str(tmp_path / "sweep.jsonl"), "--device", "cpu")
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_a_cell_is_measured(
    demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stepgraph.measure.sweep.processes._Process", None)  # what would measure one
    (tmp_path / "file").touch()
    code, out, err = run(capsys, "--out", str(tmp_path / "file" / "sweep.jsonl"), "--device", "cpu")
    assert (
        (code, out) == (2, "")
        and f"{tmp_path / 'file' / 'sweep.jsonl'} cannot be written: " in err
        and len(err.splitlines()) == 1
    )
