"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.whole_file import beside, require_writable, write_whole


def test_the_new_file_is_there_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with beside(path) as unfinished:
        unfinished.write_text("ne")
        assert path.read_text() == "old" and unfinished.parent == tmp_path and unfinished.suffix == ".tmp"
        unfinished.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_who_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), beside(path) as unfinished:
        unfinished.write_text("ne")
        raise KeyboardInterrupt
    with pytest.raises(UnicodeError):
        write_whole(path, "half a \ud800 character")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.json", [str(digit) * 100_000 for digit in range(8)]
    with beside(path) as one, beside(path) as other:
        assert one != other
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_whole(path, text), texts * 5))
    assert path.read_text() in texts and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "result", "for the group too")
        with beside(tmp_path / "cache", mode=0o600):
            pass
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("result", "cache")] == [0o640, 0o600]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "no" / "a.json"):
        with pytest.raises(OSError, match=f"{path} cannot be written: "):
            write_whole(path, "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"] and not list((tmp_path / "folder").iterdir())


def test_whether_a_file_could_be_written_is_asked_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    require_writable(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("old")
    require_writable(path)
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match="b.jsonl cannot be written: "):
        require_writable(path / "b.jsonl")
