"""`stepgraph account` without a GPU: it predicts, and reads traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from measure.traces import graph_step

from stepgraph.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["account", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    events = [event for i in range(5) for event in graph_step(1000 * i, 10 * i, idle=100)]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def test_the_chapters_two_cases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--predict", "llama-3-8b")
    assert (code, err) == (0, "")
    assert "T_GPU 4.48 ms / 330 launches = 13.6 µs" in out and "proves neither" in " ".join(out.split())
    code, out, _ = run(capsys, "--predict", "llama-3-8b", "--tp", "8", "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and notes[0].startswith("T_GPU 0.56 ms / 394 launches = 1.42 µs")
    assert notes[1].startswith("395 × 2.37 µs = 0.94 ms")


def test_on_an_h200(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--predict", "llama-3-8b", "--gpu", "h200", "--json")
    assert code == 0 and json.loads(out)["notes"][0].startswith("T_GPU 3.13 ms")


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_it_says_so_and_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llama-3-8b", "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and "no GPU here" in notes[0] and "330 launches" in notes[1]


def test_a_trace_from_elsewhere(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "waterfall.png"
    code, out, err = run(capsys, "--trace", str(trace), "--picture", str(picture), "--json")
    assert (code, err) == (0, "") and picture.stat().st_size > 1000
    found = json.loads(out)
    assert "5 steps in" in found["definition"]
    assert found["verdicts"]["trace"]["findings"][0].startswith("idle break: 101")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--predict", "llama-3-8b", "--tp", "5"], "tp 5"),
        (["--predict", "no-such-model"], "none of the shapes"),
        (["--trace", "none.json"], "No such file"),
        (["--predict", "llama-3-8b", "--rows", "4"], "--rows: only a measurement on a GPU takes this"),
        (["--device", "cpu", "--rows", "4", "--context", "9"], "--rows and --context: only a measurement"),
        (["--device", "cpu", "--operations", "fused"], "--operations: only a measurement"),
        (["--trace", "trace.json", "--rows", "4"], "the steps of a trace have run already"),
        (["llama-3-8b", "--predict", "llama-3-8b"], "give one of them"),
        (["--predict", "llama-3-8b", "--picture", "x.png"], "there is none without"),
        (["--predict", "llama-3-8b", "--picture", "x.pdf"], "must end in .png"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and why in err
