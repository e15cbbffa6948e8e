"""Imports point down the list of rooms only, and the runtime depends on torch, numpy and the standard library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "stepgraph"
ROOMS = ("cli", "measure", "engine", "comm", "ops", "runtime")  # from the top down
RUNTIME_NEEDS = {"torch", "numpy"}


def sources(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module `path` imports, wherever in the file, as (line, absolute dotted name)."""
    package = ("stepgraph", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from .. import x` and `from stepgraph import x` may name a room in x
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    allowed = set(ROOMS[ROOMS.index(room) :])
    if room == "cli":
        allowed.add("__version__")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in sources(room)
        for line, name in imported(path)
        if name.split(".")[0] == "stepgraph" and name.split(".")[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_needs_only_torch_numpy_and_the_standard_library() -> None:
    wrong = []
    for path in sources("runtime"):
        relative = path.relative_to(PACKAGE / "runtime")
        in_cuda_platform = relative.parts[0] == "platforms" and relative.parts[1].startswith("cuda")
        for line, name in imported(path):
            top = name.split(".")[0]
            if top == "stepgraph" or top in sys.stdlib_module_names or top in RUNTIME_NEEDS:
                continue
            if name.startswith("cuda.bindings") and in_cuda_platform:
                continue
            wrong.append(f"runtime/{relative}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_source_is_in_a_room() -> None:
    loose = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py"}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert loose == {"__init__.py", "__main__.py"}
    assert rooms <= set(ROOMS)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, stepgraph.cli.app; print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    import stepgraph

    assert set(stepgraph.__all__) <= set(dir(stepgraph))
    for name in stepgraph.__all__:
        assert getattr(stepgraph, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        stepgraph.nonsense  # noqa: B018


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
