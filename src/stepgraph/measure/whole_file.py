"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepgraph.runtime.errors import ConfigError


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """The name to write to, this process's own; renamed to `path` once all is there, and gone where it is not.

    Raises OSError, which names `path`, where it cannot be written.
    """
    unfinished = _unfinished(path)
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename: who is interrupted leaves the old file. Raises OSError where it cannot,
    UnicodeError for text that is none."""
    data = text.encode("utf-8")
    with beside(path) as unfinished:
        unfinished.write_bytes(data)


def require_writable(path: Path) -> None:
    """Make the folders above, and raise ConfigError where `write_whole` could not write. The file stays as it is."""
    unfinished = _unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
