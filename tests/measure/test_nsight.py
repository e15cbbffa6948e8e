"""Nsight Systems' SQLite, by small files made to its schema: a real report has not been read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from measure.programs import Program, eager, graphs, write_kineto, write_nsight

from stepgraph.measure.trace.errors import TraceError
from stepgraph.measure.trace.kineto import Trace
from stepgraph.measure.trace.launches import join, on_gpu
from stepgraph.measure.trace.loop import account_for
from stepgraph.measure.trace.read import read_any


@pytest.mark.parametrize("make", [eager, graphs])
def test_it_says_the_same_as_torchs_profiler(tmp_path: Path, make: type[Program]) -> None:
    program = make(6)
    program.spans.append(("warm up", 1.0, 2.0, program.thread))
    program.overheads.append(("Buffer flush", 3.0, 4.0, program.thread))
    kineto, nsight = read_any(write_kineto(tmp_path / "t.json", program)), read_any(_write(tmp_path, [program]))
    assert [(c.name, c.start, c.stop) for c in nsight.calls] == [(c.name, c.start, c.stop) for c in kineto.calls]
    assert _ran(nsight) == [(name.split(" (")[0], *rest) for name, *rest in _ran(kineto)]
    assert [(s.name, s.start) for s in nsight.annotations] == [("warm up", 1.0)]
    assert [(s.name, s.stop) for s in nsight.overheads] == [("Buffer flush", 4.0)]
    assert nsight.gpus == kineto.gpus == {0: "NVIDIA Tape"}
    ours, theirs = account_for(nsight), account_for(kineto)
    assert [step.total for step in ours.waterfalls] == pytest.approx([step.total for step in theirs.waterfalls])


def test_processes_count_their_launches_apart(tmp_path: Path) -> None:
    trace = read_any(_write(tmp_path, [eager(6), graphs(6)]))
    assert {activity.device for activity in trace.activities} == {0, 1}
    for gpu, launches in ((0, 6 * 68), (1, 6 * 2)):
        mine, _ = on_gpu(trace, gpu)
        assert len(join(mine)) == launches
        assert len(account_for(mine).steps) == 4
    assert on_gpu(trace, None)[1] == 0  # the busiest


def test_graphs_as_a_whole(tmp_path: Path) -> None:
    program = Program()
    for _ in range(6):
        program.graph("graph", us=500)
        program.wait()
    path = _write(tmp_path, [program])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT start, end, deviceId, contextId, streamId, "
            "correlationId, globalPid, 3 AS graphId, 4 AS graphExecId FROM CUPTI_ACTIVITY_KIND_KERNEL"
        )
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    trace = read_any(path)
    assert {activity.name for activity in trace.activities} == {"graph 3, as a whole"}
    assert account_for(trace).waterfalls[0].busy == pytest.approx(500)


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "PROFILER_OVERHEAD", "TARGET_INFO_GPU", "StringIds"])
def test_tables_that_may_be_missing(tmp_path: Path, table: str) -> None:
    trace = read_any(write_nsight(tmp_path / "t.sqlite", [eager(6)], drop=table))
    assert len(trace.activities) == 6 * 68


def test_an_older_export_that_names_no_process(tmp_path: Path) -> None:
    path = _write(tmp_path, [graphs(6)])
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("KERNEL", "MEMCPY"):
            database.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_{table} DROP COLUMN globalPid")
    assert len(account_for(read_any(path)).steps) == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME", "no calls of CUDA"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN deviceId", "no such column: deviceId"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 1", "a row is not as"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x'", "a row is not as"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME", "no calls of CUDA"),
    ],
)
def test_odd_files(tmp_path: Path, change: str, why: str) -> None:
    path = _write(tmp_path, [eager(4)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)
    with pytest.raises(TraceError, match=why) as failed:
        read_any(path)
    assert "t.sqlite" in str(failed.value)


def test_damaged_files(tmp_path: Path) -> None:
    path = _write(tmp_path, [eager(40)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="malformed"):
        read_any(path)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as database, database:
        database.execute("CREATE TABLE words (word TEXT)")
    with pytest.raises(TraceError, match="nothing that ran on a device"):
        read_any(tmp_path / "other.sqlite")


def test_other_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_bytes(b"")
    host = tmp_path / "host.json"
    host.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "add", "ts": 1}]}', encoding="utf-8")
    for path, why in (
        (empty, "the file is empty"),
        (host, "have the profiler record CUDA"),
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "r.nsys-rep", "nsys export --type sqlite"),
    ):
        with pytest.raises(TraceError, match=why):
            read_any(path)


def _write(folder: Path, programs: list[Program]) -> Path:
    return write_nsight(folder / "t.sqlite", programs)


def _ran(trace: Trace) -> list[tuple[str, str, float, float, int, int | None]]:
    return [(a.name, a.kind, a.start, a.stop, a.device, a.graph_node) for a in trace.activities]
