"""`stepgraph plan ladder` from the command line."""

import json
from pathlib import Path

import pytest
from measure.ladder_cases import AZURE

from stepgraph.cli.app import main
from stepgraph.measure.ladder_fit.traffic import load_traffic


@pytest.fixture
def curve(tmp_path: Path) -> str:
    path = tmp_path / "curve.json"
    samples = {str(size): [4 + size / 50] for size in (1, 16, 64)}
    path.write_text(json.dumps({"curve": {"what": "made up for a test", "samples": samples}}))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "ladder", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_trace(capsys: pytest.CaptureFixture[str], curve: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ladder.png"
    asked = [str(AZURE), "--curve", curve, "--holdout", "--max-rows", "48", "--picture", str(picture)]
    code, out, err = run(capsys, *asked, "--json")
    assert (code, err) == (0, "") and picture.stat().st_size > 1000
    found = json.loads(out)
    assert found["sizes"][-1] == 48 and len(found["sizes"]) <= 12
    code, out, _ = run(capsys, *asked[:3], "--prefill-us", "20", "--max-mib", "100", "--mib-a-size", "24")
    assert code == 0 and "At most 4 sizes" in out and "20 µs each" in " ".join(out.split())
    flags = out.splitlines()[-3:]
    assert [line.split(" ")[0] for line in flags] == ["vLLM:", "SGLang:", "stepgraph:"]
    assert flags[0].startswith("vLLM: --cudagraph-capture-sizes ") and flags[0].endswith(" 64")


def test_what_context_adds_is_the_curves_own(capsys: pytest.CaptureFixture[str], curve: str, tmp_path: Path) -> None:
    """So many ns a token of the trace's mean context, unless µs a row are given."""
    found = json.loads(Path(curve).read_text())["curve"]
    with_tokens = tmp_path / "tokens.json"
    with_tokens.write_text(json.dumps({"curve": {**found, "token_ns": 20.0}}))
    context = load_traffic(AZURE).mean_context
    notes = []
    for arguments in ([], ["--row-us", "3.25"]):
        code, out, _ = run(capsys, str(AZURE), "--curve", str(with_tokens), *arguments)
        assert code == 0
        notes.append(" ".join(out.split()))
    assert f"{round(20 * context) / 1e3:g} µs more" in notes[0] and "3.25 µs more" in notes[1]


def test_a_histogram(capsys: pytest.CaptureFixture[str], curve: str, tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text('{"5": 100, "9": 20}')
    code, out, _ = run(capsys, str(tmp_path / "steps.json"), "--curve", curve)
    assert code == 0 and out.splitlines()[-1] == "stepgraph: --ladder 5,9,64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-sizes", "0"], "room for no size"),
        (["--max-mib", "5"], "needs --mib-a-size"),
        (["--max-rows", "65"], "where the latency curve ends"),
        (["--max-mib", "nan", "--mib-a-size", "1"], "is no number"),
        (["--max-mib", "5", "--mib-a-size", "inf"], "needs --mib-a-size"),
        (["--rate", "-1"], "not above 0"),
        (["--rate", "1e-300"], "more than a century"),
        (["--row-us", "inf"], "at most a second"),
        (["--prefill-us", "1e300"], "at most a second"),
        (["--row-us", "-1"], "not below 0"),
        (["--prefill-us", "0"], "above it"),
        (["--picture", "ladder.pdf"], "must end in .png"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], curve: str, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, str(AZURE), "--curve", curve, *arguments)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
