"""The kernel cache: compiled once, never wrong, never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepgraph.ops.kernel_cache import cached, kernel_cache_dir


class Compiler:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return b"binary %d" % self.calls


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiler = Compiler()
    assert {cached(["source", "-DX=1"], compiler, tmp_path) for _ in range(3)} == {b"binary 1"}
    assert compiler.calls == 1 and len(list(tmp_path.iterdir())) == 1


def test_everything_it_depends_on_tells_it_apart(tmp_path: Path) -> None:
    compiler = Compiler()
    for parts in (["a", "b"], ["a", "c"], ["ab"], ["a", "b", "13.0"]):
        cached(parts, compiler, tmp_path)
    assert compiler.calls == 4


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)])
def test_what_is_damaged_is_written_again(content: bytes, tmp_path: Path) -> None:
    compiler = Compiler()
    cached(["source"], compiler, tmp_path)
    next(tmp_path.iterdir()).write_bytes(content)
    assert cached(["source"], compiler, tmp_path) == cached(["source"], compiler, tmp_path) == b"binary 2"


def test_a_folder_that_cannot_be_costs_time_only(tmp_path: Path) -> None:
    compiler, file = Compiler(), tmp_path / "file"
    file.touch()
    assert [cached(["source"], compiler, file) for _ in range(2)] == [b"binary 1", b"binary 2"]


def test_it_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache_dir() == tmp_path / "stepgraph" / "kernels"
    assert cached(["source"], Compiler()) == b"binary 1" and len(list(kernel_cache_dir().iterdir())) == 1
