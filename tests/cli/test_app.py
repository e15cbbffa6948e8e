"""The command line's grammar, and how it ends: one line for what a user can cause, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepgraph import __version__
from stepgraph.cli import env as env_module
from stepgraph.cli import run as run_module
from stepgraph.cli.app import main
from stepgraph.runtime.errors import ConfigError

SRC = Path(__file__).resolve().parents[2] / "src"


def call(*argv: str) -> int:
    """The exit status of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"stepgraph {__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    assert "run" in text and "env" in text


def test_run_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--help") == 0
    text = capsys.readouterr().out
    for name in run_module.RunOptions.__dataclass_fields__:
        option = {"prompts": "prompts", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))
        assert option in text


@pytest.mark.parametrize("argv", [["nonsense"], ["run", "--graphs", "half"], ["run", "--device", "tpu"], ["--what"]])
def test_wrong_use_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*argv) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--model", "", "hello"],
        ["verify", "--model", ""],
        ["memory", "--model", ""],
        ["plan", "memory", ""],
        ["census", ""],
        ["account", ""],
        ["account", "--predict", ""],
        ["bench", ""],
        ["padding", ""],
        ["tune", "tiles", ""],
        ["sweep", "--out", "x", ""],
    ],
)
def test_an_empty_name_is_no_model(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*argv) == 2
    assert "the name is empty" in capsys.readouterr().err


def test_a_users_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(options: object) -> None:
        raise ConfigError("ladder: size 0 is not positive")

    monkeypatch.setattr(run_module, "run", fail)
    assert call("run", "hello") == 2
    assert capsys.readouterr() == ("", "error: ladder: size 0 is not positive\n")


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run", interrupt)
    assert call("run", "hello") == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*, as_json: bool) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(env_module, "env", bug)
    with pytest.raises(ZeroDivisionError):
        main(["env"])


@pytest.mark.parametrize("buffered", [True, False])
def test_a_broken_pipe_is_quiet(buffered: bool) -> None:
    code = "import stepgraph.cli.env as e, stepgraph.cli.app as a; e.env = lambda as_json: {}; a.main(['env'])"
    code = code.format("print('x') or True" if buffered else "print('x' * 10**6, flush=True) or True")
    read_end, write_end = os.pipe()
    os.close(read_end)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_rank_that_fails_ends_with_its_code_whatever_its_threads_do() -> None:
    code = "import atexit, os; atexit.register(os.abort); from stepgraph.cli.app import main; main(['run', '--what'])"
    env = {**os.environ, "PYTHONPATH": str(SRC), "RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "No such option" in done.stderr
