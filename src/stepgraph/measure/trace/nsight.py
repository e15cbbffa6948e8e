"""Reads what `nsys export --type sqlite` makes of a report of Nsight Systems.

Its tables are made as they are needed and differ between versions: what may be missing is looked for first. Times there
are ns since the session began, on one clock. A thread's id has its process in the upper bits, and correlations count
anew in each process. Written against the published schema.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sys import intern
from typing import Any

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Activity, Call, Span, Trace

_PREFIX = "CUPTI_ACTIVITY_KIND_"
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+(_ptsz|_ptds)?$")  # cudaLaunchKernel_v7000
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
_RANGES = (59, 60)  # NVTX: push and pop, start and end
_PROCESS = 24  # bits of the thread in a serialised id
_CORRELATION = 32  # bits
_ON_DEVICE = {"KERNEL": "kernel", "GRAPH_TRACE": "kernel", "MEMCPY": "gpu_memcpy", "MEMSET": "gpu_memset"}


def read_nsight(path: Path) -> Trace:
    """The trace in an SQLite file. Each process's device is a device of its own, numbered from 0.

    Raises:
        TraceError: it is no such file, or lacks a table or a column that is needed.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _Report(database).trace()
    except sqlite3.Error as error:
        raise TraceError(f"{path}: not as Nsight Systems exports it: {error}") from None
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: a row is not as Nsight Systems exports it: {error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


class _Report:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        self._strings: dict[int, str] = {}
        self._tells_processes = False
        if "StringIds" in self._tables:
            self._strings = {number: intern(text) for number, text in self._rows("StringIds", "id", "value")}

    def trace(self) -> Trace:
        ran = [_PREFIX + kind for kind in _ON_DEVICE if _PREFIX + kind in self._tables]
        if not ran:
            raise TraceError("nothing that ran on a device; record with nsys profile --trace=cuda")
        if f"{_PREFIX}RUNTIME" not in self._tables:
            raise TraceError("no calls of CUDA in it; record with nsys profile --trace=cuda")
        self._tells_processes = all(self._optional(table, "globalPid") == ["globalPid"] for table in ran)
        names = {number: intern(_VERSION.sub("", text)) for number, text in self._strings.items()}
        devices: dict[tuple[int, int], int] = {}
        activities = [
            Activity(name, _ON_DEVICE[kind], start, stop, devices.setdefault(where, len(devices)), stream, launch, node)
            for kind in _ON_DEVICE
            for name, start, stop, where, stream, launch, node in self._activities(kind)
        ]
        calls = [
            Call(
                names.get(name, f"call {name}"),
                start / 1e3,
                _stop(start, stop),
                thread or 0,
                self._key(thread, correlation),
            )
            for start, stop, thread, correlation, name in self._rows(
                f"{_PREFIX}RUNTIME", "start", "end", "globalTid", "correlationId", "nameId"
            )
        ]
        return Trace(
            tuple(sorted(activities, key=lambda a: a.start)),
            tuple(sorted(calls, key=lambda c: c.start)),
            tuple(sorted(self._ranges(), key=lambda s: s.start)),
            tuple(sorted(self._overheads(), key=lambda s: s.start)),
            self._gpus(devices),
        )

    def _activities(self, kind: str) -> Iterator[tuple[str, float, float, tuple[int, int], int, int, int | None]]:
        """name, start, stop, (process, device), stream, correlation, node."""
        table = _PREFIX + kind
        if table not in self._tables:
            return
        named = {"KERNEL": "demangledName", "MEMCPY": "copyKind", "GRAPH_TRACE": "graphId"}.get(kind, "NULL")
        fields = ("start", "end", "deviceId", "streamId", "correlationId", named)
        optional = self._optional(table, "globalPid", "graphNodeId")
        for start, stop, device, stream, correlation, what, process, node in self._rows(table, *fields, *optional):
            if kind == "KERNEL":
                name = self._strings.get(what, f"kernel {what}")
            elif kind == "MEMCPY":
                name = f"Memcpy {_COPIES.get(what, what)}"
            else:
                name = "Memset" if kind == "MEMSET" else f"graph {what}, as a whole"
            launch = self._key(process, correlation)
            yield intern(name), start / 1e3, _stop(start, stop), (process or 0, device), stream, launch, node or None

    def _ranges(self) -> Iterator[Span]:
        if "NVTX_EVENTS" not in self._tables:
            return
        fields = ("start", "end", "text", *self._optional("NVTX_EVENTS", "textId", "eventType", "globalTid"))
        for start, stop, text, text_id, kind, thread in self._rows("NVTX_EVENTS", *fields):
            name = text or self._strings.get(text_id)
            if stop is not None and stop > start and name and (kind is None or kind in _RANGES):
                yield Span(intern(name), start / 1e3, stop / 1e3, thread or 0)

    def _overheads(self) -> Iterator[Span]:
        if "PROFILER_OVERHEAD" in self._tables:
            for start, stop, thread, name in self._rows("PROFILER_OVERHEAD", "start", "end", "globalTid", "nameId"):
                yield Span(self._strings.get(name, "profiler"), start / 1e3, _stop(start, stop), thread or 0)

    def _gpus(self, devices: dict[tuple[int, int], int]) -> dict[int, str]:
        if "TARGET_INFO_GPU" not in self._tables:
            return {}
        names = dict(self._rows("TARGET_INFO_GPU", "id", "name"))
        return {number: str(names[device]) for (_, device), number in devices.items() if device in names}

    def _key(self, process_or_thread: int | None, correlation: int | None) -> int:
        """A correlation that no other process has; 0 where there is none."""
        process = (process_or_thread or 0) >> _PROCESS if self._tells_processes else 0
        return process << _CORRELATION | correlation if correlation else 0

    def _optional(self, table: str, *columns: str) -> list[str]:
        there = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
        return [column if column in there else "NULL" for column in columns]

    def _rows(self, table: str, *columns: str) -> Iterator[Any]:
        # Quoted in double quotes, an unknown column would be taken for a text.
        quoted = [column if column == "NULL" else f"[{column}]" for column in columns]
        return self._database.execute(f"SELECT {', '.join(quoted)} FROM {table}")


def _stop(start: int, stop: int) -> float:
    if stop < start:
        raise ValueError(f"from {start} to {stop} ns")
    return stop / 1e3
