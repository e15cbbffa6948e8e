"""`stepgraph padding` from the command line."""

import json
from pathlib import Path

import pytest
from engine.hf import write_checkpoint

from stepgraph.cli.app import main
from stepgraph.measure.curve import LatencyCurve, curve_result

ROUTE = {"kind": "uniform", "query_len": 1, "real": 9, "padded": 16, "mode": "FULL", "reason": "padded", "steps": 100}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["padding", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    curve = curve_result(LatencyCurve({9: [5.25, 5.25], 16: [6.0, 6.0]}, "a step"))
    for name, found in (("curve", curve.to_json()), ("run", {"routes": [ROUTE]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    return {name: str(tmp_path / f"{name}.json") for name in ("curve", "run")}


def test_a_run_against_an_old_curve(capsys: pytest.CaptureFixture[str], files: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["--run", files["run"], "--curve", files["curve"]]
    code, out, err = run(capsys, *given, "--json", "--picture", str(tmp_path / "padding.png"))
    found = json.loads(out)
    assert (code, err) == (0, "") and found["samples"]["time of padding"] == [75.0]
    assert "Nothing was measured now" in found["notes"][0]
    assert (tmp_path / "padding.png").stat().st_size > 1000
    code, out, _ = run(capsys, *given)
    assert code == 0 and "padding of the run" in out
    code, out, _ = run(capsys, *given, "--prometheus")
    assert code == 0 and out.startswith("# HELP stepgraph_padding_steps_total") and "} 0.075\n" in out


def test_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = str(write_checkpoint(tmp_path / "model"))
    capsys.readouterr()  # what transformers tells of writing it
    small = ["--device", "cpu", "--max-rows", "4", "--context", "16"]
    code, out, err = run(capsys, model, *small, "--pairs", "3:4", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and set(found["curve"]["samples"]) == {"1", "2", "3", "4"}
    assert len(found["samples"]["3 → 4: measured"]) == 4 and "host time" in found["definition"]
    assert "2 rounds of the curve and 4 of a pair" in found["notes"][0]
    code, out, _ = run(capsys, model, *small, "--json")
    assert "Left out: 9 → 16, 300 → 304" in json.loads(out)["notes"][1] and "pairs" not in json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prometheus"], "give one with --run"),
        (["--prometheus", "--json", "--run", "{run}"], "two forms"),
        (["--curve", "{curve}", "--pairs", "9:16"], "nothing is measured"),
        (["--curve", "{run}"], "holds no latency curve"),
        (["--curve", "{curve}", "--run", "{curve}"], "holds no routes"),
        (["--curve", "{curve}", "--max-rows", "4", "--context", "9"], "leave out --max-rows, --context, or the curve"),
        (["--max-rows", "-1"], "--max-rows is -1"),
        (["--pairs", "16:9"], "a size and a larger one"),
        (["--picture", "padding.svg"], "must end in .png"),
        (["--max-rows", "0"], "at least 1"),
        (["--max-rows", "0", "--pairs", "1:2"], "--max-rows is 0"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], files: dict[str, str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *(argument.format(**files) for argument in arguments))
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"real": "9"}, "whole numbers"),
        ({"steps": 1.5}, "whole numbers"),
        ({"mode": 5}, "are texts"),
        ({"query_len": 0}, "cannot be"),
        ({"steps": -1}, "cannot be"),
        ({"real": 17}, "cannot be"),
        ({"real": 0, "padded": 0}, "cannot be"),
    ],
)
def test_routes_that_no_run_prints(
    capsys: pytest.CaptureFixture[str], files: dict[str, str], wrong: dict[str, object], message: str
) -> None:
    Path(files["run"]).write_text(json.dumps({"routes": [ROUTE | wrong]}), encoding="utf-8")
    code, out, err = run(capsys, "--run", files["run"], "--curve", files["curve"])
    assert (code, out) == (2, "") and f"run: {files['run']} holds no routes" in err and message in err
