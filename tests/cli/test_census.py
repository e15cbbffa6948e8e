"""`stepgraph census` from the command line."""

import json
from pathlib import Path

import pytest
import torch
from engine.hf import write_checkpoint

from stepgraph.cli.app import main

CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="counts the tape's operators")

STEP = """
import torch
from stepgraph.runtime import region

def make():
    x = torch.zeros(4, 4)

    def step():
        for layer in range(2):
            with region(f"layers.{layer}"):
                x.mul_(2)

    return step

def nothing():
    return 3

def asks(device):
    return make()

def makes_one_that_asks():
    return asks
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["census", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_step.py"
    path.write_text(STEP, encoding="utf-8")
    return path


@CPU
def test_a_users_own_step(capsys: pytest.CaptureFixture[str], step_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "census.png"
    code, out, err = run(capsys, "--step", f"{step_file}:make", "--json", "--picture", str(picture))
    assert (code, err) == (0, "") and picture.stat().st_size > 1000
    found = json.loads(out)
    assert found["graph"]["layers"] == 2 and found["graph"]["total"] == 2
    assert "the tape records" in found["notes"][0]


@CPU
@pytest.mark.parametrize("by", ["engine", "transformers"])
def test_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path, by: str) -> None:
    pytest.importorskip("transformers")
    write_checkpoint(tmp_path / "model")
    extra = ["--transformers"] if by == "transformers" else []
    code, out, _ = run(capsys, str(tmp_path / "model"), "--context", "32", "--rows", "2", "--json", *extra)
    found = json.loads(out)
    assert code == 0 and found["graph"]["layers"] == 2
    assert ("by transformers" in found["definition"]) is (by == "transformers")
    assert ("norm_qkv_rope_write" in found["graph"]["operations"]) is (by == "engine")


@CPU
def test_a_family_that_only_transformers_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 48, "n_head": 6, "n_layer": 2, "vocab_size": 260, "bos_token_id": None, "eos_token_id": None}
    transformers.AutoConfig.for_model("gpt2", **sizes).save_pretrained(tmp_path)
    code, out, _ = run(capsys, str(tmp_path), "--context", "32")
    assert code == 0 and "by transformers" in out and "attn/c_attn" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "{step}:absent"], "cannot be loaded"),
        (["--step", "{step}:nothing"], "that returns the step, itself"),
        (["--step", "{step}:asks"], "must be a function without arguments"),
        (["--step", "{step}:makes_one_that_asks"], "itself one without arguments"),
        (["--step", "no colon"], "is not FILE.py:FUNCTION or MODULE:FUNCTION"),
        (["--step", "{step}:make", "llama-3-8b"], "both a model and --step"),
        (["--rows", "0"], "both start at 1"),
        (["--picture", "census.jpg"], "must end in .png"),
        (["llama-3-8b", "--transformers"], "transformers is given a Hugging Face directory"),
        (["llama-3-8b", "--context", "9000"], "lower the tokens of context"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], step_file: Path, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *(argument.format(step=step_file) for argument in arguments))
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
