"""`stepgraph verify` on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine.hf import write_checkpoint

from stepgraph.cli.app import main


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *argv])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("llama")))


def test_every_key_is_listed(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", checkpoint, "--device", "cpu") == 0
    out, err = capsys.readouterr()
    assert err.startswith("verifying ") and "graphs against eager" in err
    lines = out.splitlines()
    assert "FULL 128 tokens: 3 batches as in eager" in lines and "FULL 1 request: 3 batches as in eager" in lines


def test_json(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", checkpoint, "--device", "cpu", "--graphs", "breakable", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {key["mode"] for key in report["keys"]} == {"BREAKABLE"}


def test_compiled_pieces(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    piecewise = ("--model", checkpoint, "--device", "cpu", "--graphs", "piecewise", "--json")
    assert call(*piecewise, "--compile", "aot_eager") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {key["mode"] for key in report["keys"]} == {"PIECEWISE"}
    assert call(*piecewise) == 2 and "are of a compiled step" in capsys.readouterr().err
    assert call(*piecewise, "--rtol", "-1") == 2 and "rtol -1.0 must be" in capsys.readouterr().err


def test_with_an_adapter(checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from engine.adapters import write_adapter

    adapter = write_adapter(Path(checkpoint), tmp_path / "adapter", seed=0)
    capsys.readouterr()  # what transformers tells of writing it
    assert call("--model", checkpoint, "--device", "cpu", "--adapter", str(adapter), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and all("1 adapter" in key["key"] for key in report["keys"]), report


def test_a_wrong_replay_is_exit_1(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepgraph.engine import LLM

    verify = LLM.verify

    def after_a_change(llm: LLM, **tolerance: float):
        object.__setattr__(llm.core.model.operations._shape, "norm_eps", 0.5)  # the graphs keep the old one
        return verify(llm, **tolerance)

    monkeypatch.setattr(LLM, "verify", after_a_change)
    assert call("--model", checkpoint, "--device", "cpu") == 1
    assert "the replay differs from eager" in capsys.readouterr().out


def test_without_graphs_there_is_nothing_to_verify(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", checkpoint, "--device", "cpu", "--graphs", "disabled") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "--graphs disabled captures nothing" in err
