"""Pictures, and what is said where there can be none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepgraph.measure.picture import new_picture, require_picture, save_picture
from stepgraph.runtime.errors import ConfigError


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    require_picture(path)
    picture = new_picture(2, 1)
    picture.subplots().plot([0, 1], [0, 1])
    save_picture(picture, path)
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be written"):
        save_picture(picture, tmp_path / "no" / "a.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        save_picture(picture, tmp_path / "b.png")
    assert not list(tmp_path.glob("*.tmp"))


def test_what_cannot_be_drawn_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="must end in .png"):
        require_picture(Path("a.pdf"))
    with pytest.raises(ConfigError, match="there is no folder"):
        require_picture(tmp_path / "no" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        require_picture(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="stepgraph\\[plot\\]"):
        require_picture(Path("a.png"))
