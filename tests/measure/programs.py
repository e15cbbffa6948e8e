"""Programs that give work to a simulated device, written as traces of either profiler."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure.traces import call, kernel, other

PROCESS, THREAD = 77, 77
LAUNCH_US, DELAY_US, GAP_US = 3.0, 5.0, 1.0
"""A launch takes so long on the host; its kernel starts so long after the call ended; so long after another one."""

Call = tuple[str, float, float, int, int]  # name, start, stop, thread, correlation
Ran = tuple[str, str, float, float, int, int, int]  # kind, name, start, stop, device, correlation, node


@dataclass
class Program:
    """The host's clock and the device's, µs. One stream."""

    host: float = 1000.0
    device: float = 0.0
    thread: int = THREAD
    gpu: int = 0
    calls: list[Call] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)
    overheads: list[tuple[str, float, float, int]] = field(default_factory=list)

    def launch(self, *names: str, us: float = 10.0, name: str = "cudaLaunchKernel", kind: str = "kernel") -> None:
        """One call; its activities one behind the other."""
        correlation = len(self.calls) + 1
        self.calls.append((name, self.host, self.host + LAUNCH_US, self.thread, correlation))
        self.host += LAUNCH_US
        for node, activity in enumerate(names):
            start = max(self.host + DELAY_US, self.device + GAP_US)
            node = node + 1 if "Graph" in name else 0
            self.ran.append((kind, activity, start, start + us, self.gpu, correlation, node))
            self.device = start + us

    def graph(self, *names: str, us: float = 10.0) -> None:
        self.launch(*names, us=us, name="cudaGraphLaunch")

    def read_back(self, us: float = 2.0) -> None:
        self.launch("Memcpy DtoH (Device -> Pinned)", us=us, name="cudaMemcpyAsync", kind="gpu_memcpy")

    def wait(self) -> None:
        until = max(self.host, self.device) + 4.0
        self.calls.append(("cudaStreamSynchronize", self.host, until, self.thread, len(self.calls) + 1))
        self.host = until

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.host
        yield
        self.spans.append((name, begin, self.host, self.thread))
        self.host += 1.0

    def kineto(self) -> list[dict[str, Any]]:
        """Events as torch's profiler writes them, in its order of kinds."""
        events = [other("user_annotation", name, start, stop) | {"tid": tid} for name, start, stop, tid in self.spans]
        events += [call(name, start, stop, key, tid=tid) for name, start, stop, tid, key in self.calls]
        for kind, name, start, stop, device, key, node in self.ran:
            event = kernel(name, start, stop, key, node=node, cat=kind)
            event["args"]["device"] = device
            events.append(event)
        return events + [other("overhead", name, start, stop) | {"tid": -1} for name, start, stop, _ in self.overheads]


def eager(steps: int, layers: int = 8, *, program: Program | None = None, host_us: float = 20.0) -> Program:
    """Decode steps of a model that reads its token back after each. host_us: between two steps."""
    program = program or Program()
    for _ in range(steps):
        program.launch("embed")
        for _ in range(layers):
            for name in ("norm", "gemm", "attention", "gemm", "norm", "gemm", "silu", "gemm"):
                program.launch(name)
        program.launch("head", us=40)
        program.launch("argmax")
        program.read_back()
        program.wait()
        program.host += host_us
    return program


def graphs(steps: int, layers: int = 8, *, program: Program | None = None, host_us: float = 20.0) -> Program:
    """The same as one graph a step."""
    program = program or Program()
    for _ in range(steps):
        program.graph("embed", *["gemm"] * 8 * layers, "argmax")
        program.read_back()
        program.wait()
        program.host += host_us
    return program


def write_kineto(path: Path, program: Program) -> Path:
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA Tape"}]}
    path.write_text(json.dumps({**head, "traceEvents": program.kineto(), "traceName": "t"}), encoding="utf-8")
    return path


SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT,
    globalTid INTEGER, textId INTEGER);
CREATE TABLE PROFILER_OVERHEAD (start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
"""
"""Those columns of Nsight Systems' tables that matter, as `.schema` prints them."""


def write_nsight(path: Path, programs: Sequence[Program], *, drop: str = "") -> Path:
    """Each program is a process. drop: a table to leave out."""
    names: dict[str, int] = {}

    def text(value: str) -> int:
        return names.setdefault(value, len(names) + 1)

    def ns(us: float) -> int:
        return round(us * 1000)

    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)

        def insert(table: str, *values: object) -> None:
            database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(values))})", values)

        for number, program in enumerate(programs):
            process = (PROCESS + number) << 24
            for name, start, stop, thread, key in program.calls:
                name_id = text(f"{name}_v7000")
                insert("CUPTI_ACTIVITY_KIND_RUNTIME", ns(start), ns(stop), 0, process | thread, key, name_id, 0)
            for kind, name, start, stop, device, key, node in program.ran:
                where = (ns(start), ns(stop), device, 1, 7, key, process)
                if kind == "gpu_memcpy":
                    insert("CUPTI_ACTIVITY_KIND_MEMCPY", *where, 8, 2, node or None)
                else:
                    insert("CUPTI_ACTIVITY_KIND_KERNEL", *where, text(name), text(name), node or None)
            for name, start, stop, thread in program.spans:
                insert("NVTX_EVENTS", ns(start), ns(stop), 59, None, process | thread, text(name))
            for name, start, stop, thread in program.overheads:
                insert("PROFILER_OVERHEAD", ns(start), ns(stop), process | thread, text(name), 0)
        insert("TARGET_INFO_GPU", 0, 0, "NVIDIA Tape")
        for value, number in names.items():
            insert("StringIds", number, value)
        if drop:
            database.execute(f"DROP TABLE {drop}")
    return path
