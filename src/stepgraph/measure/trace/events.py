"""Reads the events of a trace in Chrome's JSON format one by one, so that a large file does not fill the memory."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stepgraph.measure.trace.errors import TraceError

CHUNK = 1 << 22
"""Characters read at once."""
MOST = 1 << 26
"""Characters that one event may have, or one of the values beside them."""

_GZIP = b"\x1f\x8b"
_BLANK = " \t\r\n"
_GOES_ON = ("", *"0123456789+-.eE")


@contextmanager
def open_events(path: Path) -> Iterator[tuple[Mapping[str, Any], Iterator[Any]]]:
    """What stands in front of a trace's events, by its key, and the events. Gzipped or not.

    Raises:
        TraceError: there is no such file, it is no JSON, is cut off, or holds no events. Also while events are read.
    """
    try:
        with _open_text(path) as text:
            reader = _Reader(text, path)
            yield reader.head(), reader.array()
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        is_zipped = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        data: Any = gzip.GzipFile(fileobj=raw) if is_zipped else raw
        # A kernel's name may hold any bytes.
        yield io.TextIOWrapper(data, encoding="utf-8", errors="replace")


class _Reader:
    """Takes one value after the other from a text that is read in chunks."""

    def __init__(self, text: IO[str], path: Path) -> None:
        self._text, self._path = text, path
        self._read, self._at, self._before = "", 0, 0
        self._ended = False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def head(self) -> dict[str, Any]:
        """All up to the first event."""
        found: dict[str, Any] = {}
        if self._next() == "[":
            return found
        if self._next() != "{":
            self._value()
            raise self._no_events()
        self._at += 1
        while self._next() != "}":
            key = self._value()
            self._skip(":")
            if key == "traceEvents" and self._next() == "[":
                return found
            found[str(key)] = self._value()
            if self._next() != "}":
                self._skip(",")
        raise self._no_events()

    def array(self) -> Iterator[Any]:
        """The values of the array that begins here."""
        self._skip("[")
        if self._next() == "]":
            return
        while True:
            yield self._value()
            if self._next() == "]":
                return
            self._skip(",")

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, stop = self._decode(self._read, self._at)
            except RecursionError:
                raise TraceError(f"{self._path}: no trace: values are nested too deep") from None
            except json.JSONDecodeError as error:
                if not self._more():
                    raise self._no_json(error.msg, error.pos) from None
                continue
            except ValueError as error:
                raise self._no_json(str(error), self._at) from None  # a number of too many digits
            # A number might go on in the next chunk, after a point or an e as well.
            if self._read[stop : stop + 1] not in _GOES_ON or not self._more():
                self._at = stop
                return value

    def _next(self) -> str:
        """The next character that is not blank, which is not taken; "" at the end."""
        while True:
            while self._at < len(self._read):
                character = self._read[self._at]
                if character not in _BLANK:
                    return character
                self._at += 1
            if not self._more():
                return ""

    def _skip(self, character: str) -> None:
        if self._next() != character:
            raise self._no_json(f"Expecting {character!r}", self._at)
        self._at += 1

    def _more(self) -> bool:
        """Whether there was more to read: as much again as waits already."""
        waiting = len(self._read) - self._at
        if self._ended or waiting > MOST:
            return False
        chunk = self._text.read(max(CHUNK, waiting))
        if not chunk:
            self._ended = True
            return False
        self._before += self._at
        self._read, self._at = self._read[self._at :] + chunk, 0
        return True

    def _no_json(self, why: str, at: int) -> TraceError:
        place = f"character {self._before + at:,}"
        if self._ended:
            total = self._before + len(self._read)
            return TraceError(f"{self._path}: no JSON, or it was cut off: {why} at {place} of {total:,}")
        return TraceError(f"{self._path}: no JSON: {why} at {place}")

    def _no_events(self) -> TraceError:
        return TraceError(f"{self._path}: no traceEvents in it; torch.profiler's export_chrome_trace writes them")
