"""Text files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename: who is interrupted leaves the old file. Raises OSError where it cannot,
    UnicodeError for text that is none."""
    data, unfinished = text.encode("utf-8"), _unfinished(path)
    unfinished.write_bytes(data)
    unfinished.replace(path)


def require_writable(path: Path) -> None:
    """Make the folders above, and raise OSError where `write_whole` could not write. The file itself stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _unfinished(path).touch()
    _unfinished(path).unlink()


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")
