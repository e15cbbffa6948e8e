"""`stepgraph run` on the demo model: what it prints, what it counts, and what it refuses."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepgraph.cli.app import main
from stepgraph.cli.run import RunOptions, gather_prompts
from stepgraph.engine.errors import RequestError

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.txt"
LAYERS = 30  # of the demo model
FRANCE = "What is the capital of France?"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run", *argv])
    return int(ended.value.code or 0)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert call("--json", *argv) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a terminal unless a test says otherwise: nothing waits for it."""
    monkeypatch.setattr("sys.stdin", Terminal())


def test_prompts_come_from_arguments_file_and_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("from file\n\n  \nsecond\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n\n"))
    assert gather_prompts(RunOptions(prompts=("a", "-"), file=tmp_path / "prompts")) == [
        "a",
        "piped",
        "from file",
        "second",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo"))
    assert gather_prompts(RunOptions()) == ["one", "two"]
    assert gather_prompts(RunOptions(prompts=("only this",))) == ["only this"]


@pytest.mark.parametrize("prompts", [(), ("",), ("fine", "  \n")])
def test_no_prompt_and_an_empty_one_are_refused(prompts: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="none given|is empty"):
        gather_prompts(RunOptions(prompts=prompts))


def test_thirteen_prompts_run_padded_to_sixteen(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--file", str(PROMPTS), "--max-tokens", "8", "--device", "cpu") == 0
    text = capsys.readouterr().out
    for number in range(1, 14):
        assert f"[{number}/13]" in text
    assert "13 → 16" in text and "3 padded rows each (FULL, padded)" in text


def test_many_steps_a_launch_give_the_same_text(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (FRANCE, "--max-tokens", "12", "--device", "cpu", "--ladder", "1")
    alone, many = as_json(capsys, *common), as_json(capsys, *common, "--steps-per-launch", "auto")
    assert alone["results"] == many["results"]
    assert alone["steps"] - many["steps"] in (0, 1)  # where a text ends early, one more step was on its way
    assert alone["loops"] == {"launches": 0, "steps": 0, "not": {}} and many["loops"]["steps"] >= 5
    assert call(*common, "--steps-per-launch", "auto") == 0
    assert "one by one" in capsys.readouterr().out  # a single answer is printed as it arrives
    assert call(*common, "--steps-per-launch", "3") == 0
    assert re.search(r"loops +\d+ steps in \d+ launches", capsys.readouterr().out)


@pytest.mark.parametrize("asked", ["0", "-1", "some", "1.5"])
def test_what_is_no_number_of_steps_is_refused(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(FRANCE, "--steps-per-launch", asked) == 2
    assert "steps_per_launch is" in capsys.readouterr().err


def test_what_breaks_cost_is_told(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(FRANCE, "--max-tokens", "2", "--device", "cpu", "--graphs", "breakable") == 0
    text = capsys.readouterr().out
    assert re.search(rf"^break +attention: {2 * LAYERS} calls between graphs, \d+ µs", text, re.MULTILINE)
    assert call(FRANCE, "--max-tokens", "2", "--device", "cpu") == 0
    assert "break " not in capsys.readouterr().out


def test_one_prompt_is_streamed_and_answered(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(FRANCE, "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert text.startswith("The capital of France is Paris.\n")
    assert "1 → 1 rows" in text and "1 request: all have graphs" in text and "tokens/s" in text


def test_json_accounts_for_every_token(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, FRANCE, "Count to three.", "Hi", "--max-tokens", "5", "--device", "cpu")
    assert report["projections"] == {}  # the same for all sizes
    assert report["captured_sizes"] == [1, 2, 4] and report["dropped_sizes"] == {} and report["changes"] == []
    assert report["captured_tokens"][-1] == len(report["coverage_mixed"]) and None not in report["coverage_mixed"]
    assert [result["prompt"] for result in report["results"]] == [FRANCE, "Count to three.", "Hi"]
    generated = sum(len(result["token_ids"]) for result in report["results"])
    assert report["tokens"]["generated"] == generated
    # Every token of a prompt is computed once; prefill samples a request's first token, and decode steps the others.
    assert report["rows"]["real"] == report["tokens"]["prompt"] + generated - 3
    for counts in (report["modes"].values(), report["reasons"].values(), [r["steps"] for r in report["routes"]]):
        assert sum(counts) == report["steps"]
    assert {route["kind"] for route in report["routes"]} == {"uniform", "mixed"}
    assert (
        sum(route["steps"] * (route["padded"] - route["real"]) for route in report["routes"])
        == (report["rows"]["padded"])
    )
    assert report["seconds"]["capture"] > 0 and report["tokens_per_second"]["decode"] > 0


def test_graphs_change_no_token(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [FRANCE, "Name a color.", "--max-tokens", "8", "--device", "cpu"]
    replayed = as_json(capsys, *common)
    eager = as_json(capsys, *common, "--graphs", "disabled")
    broken = as_json(capsys, *common, "--graphs", "breakable")
    phases = as_json(capsys, *common, "--graphs", "FULL_AND_PIECEWISE")
    assert eager["modes"] == {"EAGER": eager["steps"]} and eager["captured_sizes"] == []
    assert replayed["modes"] == {"FULL": replayed["steps"]}
    assert broken["modes"] == {"BREAKABLE": broken["steps"]}
    assert set(phases["modes"]) == {"FULL", "BREAKABLE"}
    assert eager["breaks"] == replayed["breaks"] == []
    for report in (broken, phases):
        (attention,) = report["breaks"]
        assert attention["name"] == "attention" and attention["host_us_per_call"] > 0
        assert attention["calls"] == LAYERS * report["modes"]["BREAKABLE"]
    for report in (replayed, broken, phases):
        assert [r["token_ids"] for r in report["results"]] == [r["token_ids"] for r in eager["results"]]


def test_a_seed_repeats_a_sampled_run(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["Once upon a time", "--no-chat", "--max-tokens", "8", "--temperature", "0.9", "--top-k", "40"]
    runs = [as_json(capsys, *common, "--device", "cpu", "--seed", seed) for seed in ("1", "1", "2")]
    first, second, other = (run["results"][0]["token_ids"] for run in runs)
    assert first == second != other


def test_more_prompts_than_rows_take_turns(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "a", "b", "c", "--max-num-seqs", "2", "--ladder", "1,2", "--max-tokens", "3")
    assert len(report["results"]) == 3
    assert max(route["real"] for route in report["routes"] if route["kind"] == "uniform") <= 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--ladder", "0,1"], "size 0 is not positive"),
        (["--ladder", "-4,1"], "size -4 is not positive"),
        (["--ladder", "1,2,2"], "size 2 is given more than once"),
        (["--ladder", "1,x"], "neither vllm, sglang nor sizes"),
        (["--ladder", "1,2", "--max-num-seqs", "3"], "no room for a batch of 3"),
        (["--max-num-seqs", "0"], "at least one request"),
        (["--tables", "/no/such/tables"], "/no/such/tables is no folder"),
        (["--tables", "/"], "they are of all-reduces among several ranks; give --tp"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "0"], "top_p must be"),
        (["--attention", "none such"], "unknown backend"),
        (["--operations", "none such"], "unknown set"),
        (["--operations", "unfused"], "runs on cuda, not on cpu"),
        (["--model", "/no/such/model"], "/no/such/model does not exist"),
        (["--model", "no-such-org/model"], "no-such-org/model is no local path, and the Hugging Face hub does not"),
        (["--file", "/no/such/prompts"], "/no/such/prompts cannot be read"),
        (["--model", "x" * 300], "x" * 300),
        (["--model", "no\nsuch"], "no such"),
        (["--ladder", "1,1000000000"], "above 65536"),
        (["--max-num-seqs", "100000000"], "max_num_seqs is 100000000; at least one request must decode at a time, at"),
        (["--min-p", "2"], "min_p must be"),
        (["--memory-fraction", "0.5"], "give kv_bytes instead"),
        (["--kv-bytes", "100"], "two KV blocks, the least"),
        ([""], "number 2 is empty"),
        (["word " * 9000], "the model allows 8192"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    demo_model: Path, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    assert call("hello", "--device", "cpu", *argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1
    assert complaint in err and out == ""


def test_a_closed_standard_input_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(RequestError, match="none given"):
        gather_prompts(RunOptions())


def test_no_gpu_where_one_is_asked_for(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert call("hello", "--device", "cuda") == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "CUDA" in err and err.count("\n") == 1


def test_memory_is_told_where_somebody_looks(
    demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [FRANCE, "--device", "cpu", "--max-tokens", "2", "--kv-bytes", str(64 << 20)]
    report = as_json(capsys, *common)
    sizes = {row["name"]: row["bytes"] for row in report["memory"]["rows"]}
    assert 0 < sizes["KV cache"] <= 64 << 20 < sizes["weights and rotary tables"]
    assert report["memory"]["total_bytes"] is None
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    assert call(*common) == 0
    out, err = capsys.readouterr()
    told = f"KV cache ({report['memory']['kv_blocks']} blocks)"
    assert told in err and "memory" in out


@pytest.mark.gpu
def test_thirteen_prompts_on_a_gpu(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "--file", str(PROMPTS), "--max-tokens", "16")
    assert report["device"].startswith("cuda")
    thirteen = {"kind": "uniform", "real": 13, "padded": 16, "mode": "FULL", "reason": "padded"}
    assert any(thirteen.items() <= route.items() for route in report["routes"])
