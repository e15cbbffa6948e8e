"""The wheel, built and installed where nothing of the source tree can help it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stepgraph import __version__

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building without a network needs hatchling: pip install '.[test]'")
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that has the wheel, and sees what this one has only behind it."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=venv)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv).strip())
    # A .pth file's own .pth files are not read: an editable install of this tree stays out of sight.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return venv / "bin"


def test_the_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources <= names
    assert "stepgraph/py.typed" in names
    assert f"stepgraph-{__version__}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_the_installed_package_is_the_one_that_runs(installed: Path) -> None:
    where = run(installed / "python", "-c", "import stepgraph; print(stepgraph.__file__)", cwd=installed)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_help(installed: Path) -> None:
    text = run(installed / "stepgraph", "--help", cwd=installed)
    assert "run" in text and "env" in text
    assert run(installed / "stepgraph", "--version", cwd=installed) == f"stepgraph {__version__}\n"


def test_env(installed: Path) -> None:
    answer = json.loads(run(installed / "stepgraph", "env", "--json", cwd=installed))
    assert answer["stepgraph"] == __version__
    assert {check["name"]: check["works"] for check in answer["checks"]}["graphs on the CPU"]
