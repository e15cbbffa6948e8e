"""`stepgraph env` reports and never fails over what does not work."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from stepgraph.cli import env as env_module
from stepgraph.cli.env import Check, env, run_checks


@pytest.fixture(scope="module")
def checks() -> dict[str, Check]:
    return {check.name: check for check in run_checks()}


def test_what_the_tests_themselves_need_works(checks: dict[str, Check]) -> None:
    for name in ("python", "torch", "graphs on the CPU", "safetensors", "tokenizers"):
        assert checks[name].works, checks[name].detail
    assert torch.__version__ in checks["torch"].detail


def test_each_check_says_why(checks: dict[str, Check]) -> None:
    for check in checks.values():
        assert check.detail and "\n" not in check.detail
    if not torch.cuda.is_available():
        assert "CUDA" in checks["CUDA device"].detail
        assert not checks["graphs on CUDA"].works and not checks["triton"].works


@pytest.mark.gpu
def test_on_a_gpu(checks: dict[str, Check]) -> None:
    assert checks["CUDA device"].works and checks["graphs on CUDA"].works
    assert torch.cuda.get_device_name(0) in checks["CUDA device"].detail


def test_json_is_json_and_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Check("torch", True, True, "2.13.0", "steps"), Check("CUDA device", False, False, "none", "GPU")]
    monkeypatch.setattr(env_module, "run_checks", lambda: found)
    assert env(as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["checks"][1] == {
        "name": "CUDA device",
        "works": False,
        "required": False,
        "detail": "none",
        "used_for": "GPU",
    }


def test_something_required_that_does_not_work_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        env_module, "run_checks", lambda: [Check("gguf", False, True, "a [broken] file", "GGUF models")]
    )
    assert not env(as_json=False)
    assert "NO" in (text := capsys.readouterr().out) and "a [broken] file" in text


def test_a_broken_package_is_a_line_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # an import of it now raises
    (gguf,) = (check for check in run_checks() if check.name == "gguf")
    assert not gguf.works and "gguf" in gguf.detail
