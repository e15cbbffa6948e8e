"""The file of a sweep: a JSON object a line and cell, whole at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepgraph.measure.sweep.cells import Key, key_of
from stepgraph.measure.sweep.check_row import require_row
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.whole_file import write_whole


class RowsFile:
    """Rows by what they measured. What another sweep adds to the file meanwhile stays in it.

    Raises:
        ConfigError: the file is there and holds something else, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Key, dict[str, Any]] = read_rows(path) if path.exists() else {}

    def add(self, row: dict[str, Any]) -> None:
        """Write the file anew with this row in it: whoever is interrupted leaves the old or the new one. Raises OSError
        where it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(self.path.parent):
            others = read_rows(self.path) if self.path.exists() else {}
            self.rows = {**self.rows, **others, key_of(row): row}
            lines = [json.dumps(each, ensure_ascii=False) for each in self.rows.values()]
            write_whole(self.path, "\n".join(lines) + "\n")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other sweep writes a file of the folder meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_rows(path: Path) -> dict[Key, dict[str, Any]]:
    """Raises ConfigError: a line is no row of a sweep, or the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"sweep: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
        try:
            row = json.loads(line)
            rows[key_of(row)] = row
            require_row(row)
        except (KeyError, TypeError, ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(
                f"sweep: {path}, line {number}, is no row of a sweep ({type(error).__name__}: {error}); "
                f"choose another file, or take the line out"
            ) from None
    return rows
