"""`stepgraph report` from the command line."""

import json
from pathlib import Path

import pytest

from stepgraph.cli.app import main
from stepgraph.measure.result import Figure, Result, write_result


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_page_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_result(
        Result("bench", "Steps.", [Figure.of("eager / graphs", 2.0, "", "time per token")]).to_json(), tmp_path
    )
    (tmp_path / "other.json").write_text("{}")
    code, out, err = run(capsys, str(tmp_path))
    assert (code, err) == (0, "") and "1 results" not in out and "left out: other.json: no result: no name" in out
    assert "2.00" in (tmp_path / "report.html").read_text(encoding="utf-8")
    code, out, _ = run(capsys, str(tmp_path), "--out", str(tmp_path / "page.html"), "--json")
    told = json.loads(out)
    assert code == 0 and Path(told["page"]).exists() and told["results"] == ["bench.json"]
    assert told["gains"][0]["times"] == "2.00"
    assert not list(tmp_path.glob("*.tmp"))


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_result(Result("bench", "Steps.").to_json(), tmp_path / "full")
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "is no folder"),
        ([str(tmp_path), "--out", str(tmp_path / "nowhere" / "page.html")], "No such file"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_the_repositorys_own_results_make_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    code, out, _ = run(capsys, str(results), "--out", str(tmp_path / "page.html"), "--json")
    assert code == 0 and json.loads(out)["left_out"] == {} and json.loads(out)["gains"]
