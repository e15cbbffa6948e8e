"""Files that are written whole or not at all: beside their place, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from stepgraph.runtime.errors import ConfigError


@contextmanager
def beside(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to write to, the caller's own whoever else writes `path` now: renamed to `path` once all is there,
    and gone where it is not. Only one whose process is killed stays behind, as a .tmp file.

    mode: the file's, less the umask. Raises OSError where it cannot be made or renamed.
    """
    unfinished = _create(path, mode)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text`: who is interrupted leaves the old file. Raises OSError, which names `path`, where it cannot be
    written, UnicodeError for text that is none."""
    data = text.encode("utf-8")
    try:
        with beside(path) as unfinished:
            unfinished.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror or error}") from None


def require_writable(path: Path) -> None:
    """Make the folders above, and raise ConfigError where `write_whole` could not write. The file stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path).unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _create(path: Path, mode: int = 0o666) -> Path:
    unfinished = path.parent / f"{path.name}.{token_hex(4)}.tmp"
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    return unfinished
