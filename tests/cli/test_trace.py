"""`stepgraph trace`: any program's trace, without a GPU."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path

import pytest
from measure.programs import Program, eager, graphs, write_kineto, write_nsight
from measure.traces import graph_step

from stepgraph.cli.app import main
from stepgraph.measure.trace import result


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def loop(tmp_path: Path) -> str:
    return str(write_kineto(tmp_path / "loop.json", eager(6)))


def test_the_tables(capsys: pytest.CaptureFixture[str], loop: str) -> None:
    code, out, err = run(capsys, loop)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "4 steps on GPU 0 (NVIDIA Tape); each begins with the launch of 'embed'" in text
    for table in ("the waterfall of a step", "kernels by share", "launches", "what the device does", "waits"):
        assert table in text
    assert "recorded on NVIDIA Tape, read on" in text and "first and the last step are left out" in text
    assert gc.isenabled()


def test_json_and_a_picture(capsys: pytest.CaptureFixture[str], loop: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "t.png"
    code, out, _ = run(capsys, loop, "--json", "--picture", str(picture))
    assert code == 0 and picture.stat().st_size > 1000
    found = json.loads(out)
    figures = {row[0]: row for row in found["rows"]}
    assert figures["step"][1] == pytest.approx(
        sum(figures[part][1] for part in ("before the first", "busy", "gaps, device", "gaps, host"))
    )
    assert all(row[-1] for row in found["rows"])  # a definition each
    assert found["kernels"][0]["name"] == "gemm" and len(found["samples"]["step"]) == 4
    assert gc.isenabled()


def test_a_report_of_nsight_systems(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_nsight(tmp_path / "report.sqlite", [eager(6), graphs(8)])
    code, out, _ = run(capsys, str(path), "--gpu", "1", "--json")
    found = json.loads(out)
    assert code == 0 and "6 steps on GPU 1 (NVIDIA Tape); each begins with a graph of 66" in found["definition"]
    assert "The trace also has GPU 0; --gpu chooses." in found["notes"]


def test_the_marks_of_our_own_instruments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [event for i in range(5) for event in graph_step(1000 * i, 10 * i, idle=100)]
    path.write_text(json.dumps(events), encoding="utf-8")
    code, out, _ = run(capsys, str(path), "--json")
    found = json.loads(out)
    assert code == 0 and "the marks that stepgraph's own instruments make" in found["definition"]
    assert found["rows"][0][1] == pytest.approx(143) and found["verdict"]["findings"][0].startswith("idle break: 101")


def test_kinds_of_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = Program()
    for number in range(30):
        program.launch("embed")
        if number % 10 == 3:
            for _ in range(60):
                program.launch("prefill")
        else:
            program.graph(*["gemm"] * 30)
        program.read_back()
        program.wait()
    _, out, _ = run(capsys, str(write_kineto(tmp_path / "t.json", program)), "--json")
    found = json.loads(out)
    kinds = next(table for table in found["tables"] if table["title"] == "kinds of steps")
    assert sorted(row[:3] for row in kinds["rows"]) == [[3, 1, 25], [62, 0, 3]]


def test_of_very_many_steps_some_are_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "MOST_STEPS", 10)
    _, out, _ = run(capsys, str(write_kineto(tmp_path / "t.json", graphs(27))), "--json")
    found = json.loads(out)
    assert "25 steps" in found["definition"] and len(found["samples"]["step"]) == 9
    assert "The figures are of one step in 3; the tables are of all." in found["notes"]


def test_oddities_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = eager(6)
    kind, name, start, stop, *rest = program.ran[2 * 68]
    program.ran[2 * 68] = (kind, name, start - 10, stop - 10, *rest)  # before its launch
    program.ran.insert(0, ("kernel", "earlier", 0.0, 900.0, 0, 99_999, 0))
    _, out, _ = run(capsys, str(write_kineto(tmp_path / "t.json", program)), "--json")
    notes = json.loads(out)["notes"]
    assert "1 of 409 activities have no launching call in the trace." in notes
    assert "1 launch began on the device before the call: the clocks disagree." in notes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.json"], "No such file"),
        (["LOOP", "--gpu", "3"], "nothing ran on GPU 3"),
        (["LOOP", "--step", "nothing"], "is in the trace 0 times"),
        (["LOOP", "--picture", "x.pdf"], "must end in .png"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], loop: str, arguments: list[str], why: str) -> None:
    code, out, err = run(capsys, *(loop if argument == "LOOP" else argument for argument in arguments))
    assert code == 2 and out == "" and err.count("\n") == 1 and why in err


def test_ten_megabytes_take_a_tenth_of_what_a_hundred_may(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "large.json", eager(100, layers=32))
    assert path.stat().st_size > 10e6
    began = time.process_time()
    code, _, _ = run(capsys, str(path), "--json")
    assert code == 0 and time.process_time() - began < 2.0 * path.stat().st_size / 10e6
