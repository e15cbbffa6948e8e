"""Sweeps: cells, processes that die, the file, the lock, the result, and a cell that is really measured."""

import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.tiny import tiny_model
from measure.sweep_cells import WORK, measure, row

from stepgraph.measure.curve import load_curve
from stepgraph.measure.report.find import find_results
from stepgraph.measure.report.page import make_page
from stepgraph.measure.show import show
from stepgraph.measure.sweep.cells import Cell, Work, key_of, make_cells
from stepgraph.measure.sweep.measure_cell import failed_row, measure_cell, measure_row
from stepgraph.measure.sweep.one_gpu import locked
from stepgraph.measure.sweep.processes import run_in_processes
from stepgraph.measure.sweep.rows_file import RowsFile, read_rows
from stepgraph.measure.sweep.sweep_result import draw, latency_lines, sweep_result
from stepgraph.runtime import CaptureError, ConfigError
from stepgraph.runtime.compiler.build import PieceCompiler


def test_every_combination_once_and_those_of_one_model_together() -> None:
    cells = make_cells(["full", "disabled"], ["triton", "reference"], ["unfused", "fused"], [1, 2, 1])
    assert len(cells) == len(set(cells)) == 16
    assert [cell.operations for cell in cells] == ["unfused"] * 8 + ["fused"] * 8
    assert str(cells[0]) == "full, triton, unfused, rows 1"


@pytest.mark.parametrize(
    ("graphs", "rows", "message"),
    [
        (["fast"], [1], "is not one of full"),
        (["full"], [0], "0 rows"),
        (["full"], [], "--rows is empty"),
        ([], [1], "--graphs is empty"),
    ],
)
def test_cells_that_cannot_be(graphs: list[str], rows: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cells(graphs, rows=rows)


def test_cells_of_a_compile_mode_are_together() -> None:
    cells = make_cells(["full", "piecewise"], compile=["off", "inductor"])
    assert [str(cell) for cell in cells] == [
        "full, rows 1", "piecewise, rows 1", "full + inductor, rows 1", "piecewise + inductor, rows 1"
    ]  # fmt: skip
    for asked, message in (([], "--compile is empty"), (["on"], "compile 'on' is not one of off, inductor")):
        with pytest.raises(ConfigError, match=message):
            make_cells(["full"], compile=asked)


def test_a_row_of_before_there_was_a_compiler_is_of_none() -> None:
    old = row(WORK, Cell("full", None, None, 1))
    del old["cell"]["compile"]
    assert key_of(old) == (WORK, Cell("full", None, None, 1, "off"))
    assert sweep_result([old]).tables[1].rows[0][-1] is None


def test_work_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="it takes 2 steps"):
        Work(None, "cpu", 32, 1)


def test_one_process_measures_all_until_it_dies() -> None:
    names = ("one", "refuse", "two", "break", "three", "die", "exit", "four")
    cells = [Cell("full", name, None, 1) for name in names]
    rows = list(run_in_processes(WORK, cells, measure, isolate=False))
    assert [key_of(found)[1] for found in rows] == cells
    one, refused, two, broke, three, died, ended, four = rows
    assert one["pid"] == two["pid"] != three["pid"] != four["pid"]
    assert refused["failed"] == "refused"
    assert broke["failed"] == "RuntimeError: CUDA error: an illegal memory access"
    assert died["failed"] == "its process was killed by SIGKILL"
    assert ended["failed"] == "its process ended with status 3"


def test_each_compile_mode_has_a_process() -> None:
    cells = make_cells(["full", "disabled"], compile=["off", "aot_eager"])
    off, off_too, compiled, compiled_too = (
        found["pid"] for found in run_in_processes(WORK, cells, measure, isolate=False)
    )
    assert off == off_too != compiled == compiled_too


def test_isolated_cells_have_a_process_each() -> None:
    rows = list(run_in_processes(WORK, make_cells(["full"], rows=[1, 2]), measure, isolate=True))
    assert rows[0]["pid"] != rows[1]["pid"]


def test_a_file_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.jsonl"
    first, second = make_cells(["full"], rows=[1, 2])
    file = RowsFile(path)
    assert file.rows == {}
    file.add(failed_row(WORK, first, "no\nroom"))
    file.add(row(WORK, second))
    again = RowsFile(path)
    assert list(again.rows) == [(WORK, first), (WORK, second)]
    assert again.rows[WORK, first]["failed"] == "no room"
    again.add(row(WORK, first))
    assert len(path.read_text().splitlines()) == 2 and not RowsFile(path).rows[WORK, first]["failed"]
    assert [each.name for each in path.parent.iterdir()] == ["sweep.jsonl"]


def test_two_sweeps_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    cells = make_cells(["full"], rows=[1, 2, 3])
    one, other = RowsFile(path), RowsFile(path)
    for file, cell in zip((one, other, one), cells, strict=True):
        file.add(row(WORK, cell))
    assert list(RowsFile(path).rows) == [(WORK, cell) for cell in cells]


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"work": {}, "cell": {}}', '{"work": {"model": 1}}'])
def test_another_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps(row(WORK, Cell("full", None, None, 1))) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 2, is no row of a sweep"):
        RowsFile(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        RowsFile(path)


ODD = (None, True, -1, 10**30, float("nan"), float("inf"), "", "text", [], {}, [[]], [None], {"a": 1})


def changed(value: Any) -> Iterator[Any]:
    """The value with any one thing in it, however deep, taken away or replaced by an odd one."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 1)):
            less = copy.copy(value)
            del less[key]
            yield less
            for other in [*ODD, *changed(value[key])]:
                more = copy.copy(value)
                more[key] = other
                yield more


def test_whatever_a_row_holds_it_is_shown_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = make_cells(["full", "disabled"], compile=["off", "inductor"])
    first = row(WORK, cells[0])
    first["capture"]["compile"] = {"seconds": 1.0}
    others = [json.dumps(row(WORK, cell)) for cell in cells[1:]]
    path, refused = tmp_path / "sweep.jsonl", 0
    rows = list(changed(first))
    for one in rows:
        path.write_text("\n".join([json.dumps(one), *others]))
        try:
            found = read_rows(path)
            for work in {work for work, _ in found}:
                show(sweep_result([each for (of, _), each in found.items() if of == work]), as_json=False)
            make_page(find_results(tmp_path))
        except ConfigError as error:
            assert "line 1, is no row" in str(error)
            refused += 1
    assert len(rows) > 300 and refused > len(rows) / 2


def test_names_may_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    file, work = RowsFile(tmp_path / "sweep.jsonl"), Work("a\u2028b\x85c", "cpu", 32, 3)
    file.add(row(work, Cell("full", None, None, 1)))
    assert list(RowsFile(file.path).rows) == [(work, Cell("full", None, None, 1))]


def test_a_lock_is_waited_for() -> None:
    order = []

    def second() -> None:
        with locked("stepgraph-test.lock"):
            order.append("second")

    other = threading.Thread(target=second)
    with locked("stepgraph-test.lock"):
        other.start()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_a_result_compares_with_eager_and_keeps_the_curves(tmp_path: Path) -> None:
    cells = make_cells(["full", "disabled"], rows=[1, 4])
    lost = failed_row(WORK, Cell("breakable", None, None, 1), "no room")
    rows = [*(row(WORK, cell) for cell in cells), lost]
    result = sweep_result(rows)
    times, captures, failed = result.tables
    assert [line[-1] for line in times.rows] == [2.0, 2.0, None, None]
    assert captures.rows[0] == ["full, reference, reference", 1, "full", "full", "FULL", 1, 1.0, 0.5, None]
    assert failed.rows == [["breakable", "its own", "its own", 1, "no room"]]
    assert any("more than one commit" in note for note in result.notes)
    assert result.commit == "c0ffee" and len(result.more["cells"]) == 5
    assert len(result.more["curves"]) == 2 and "curve" not in result.more
    assert latency_lines(rows)["full, reference, reference"] == [(1, 1.0), (4, 4.0)]
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(sweep_result(rows[:2]).to_json()))
    assert load_curve(path).ms(1) == 1.0 and "the host computes" in load_curve(path).what


def test_compiled_cells_are_compared_with_eager_ones_that_are_not() -> None:
    asked = make_cells(["piecewise", "disabled"], compile=["off", "inductor"])
    cells = [row(WORK, cell) for cell in asked[1:]] + [failed_row(WORK, asked[0], "not compiled")]
    result = sweep_result(cells)
    times = {line[0].split(",")[0]: line[-1] for line in result.tables[0].rows}
    assert times == {"disabled": None, "piecewise + inductor": 2.0, "disabled + inductor": 1.0}
    assert result.tables[2].rows[0][0] == "piecewise" and len(result.more["curves"]) == 3


def test_cells_that_all_failed_are_a_result() -> None:
    result = sweep_result([failed_row(WORK, Cell("full", None, None, 1), "no room")])
    assert not result.tables[0].rows and result.tables[2].rows[0][-1] == "no room"


def test_a_picture_even_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "a.png", [row(WORK, Cell("full", None, None, 1))])
    draw(tmp_path / "b.png", [failed_row(WORK, Cell("full", None, None, 1), "no room")])
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))


@pytest.mark.parametrize("graphs", ["full", "breakable", "disabled", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_cell_is_measured(graphs: str, device: str) -> None:
    work, cell = Work(None, device, 32, 5), make_cells([graphs], rows=[3])[0]
    found = measure_cell(tiny_model(device), work, cell)
    ran = {"full": "FULL", "FULL_AND_PIECEWISE": "FULL", "breakable": "BREAKABLE", "disabled": "EAGER"}[graphs]
    assert list(found["resolved"]["steps"]) == [ran]
    assert (found["capture"]["graphs"] > 0) is (found["capture"]["pool_bytes"] > 0) is (graphs != "disabled")
    clocks = {"host_us", "latency_ms", *(["device_ms"] if device == "cuda" else [])}
    assert set(found["samples"]) == clocks and all(len(taken) == 5 for taken in found["samples"].values())
    json.dumps(found)


@pytest.mark.parametrize(
    ("graphs", "ran"),
    [("full", "FULL"), ("piecewise", "PIECEWISE"), ("breakable", "PIECEWISE"), ("disabled", "EAGER")],
)
def test_a_compiled_cell_is_measured(device: torch.device, graphs: str, ran: str) -> None:
    work, (cell,) = Work(None, device.type, 32, 5), make_cells([graphs], rows=[3], compile=["aot_eager"])
    found = measure_cell(tiny_model(device, operations="reference"), work, cell)
    assert list(found["resolved"]["steps"]) == [ran] and not found["capture"]["dropped"]
    assert found["capture"]["compile"]["steps"] > 0 and found["capture"]["compile"]["seconds"] > 0


def test_what_cannot_be_compiled_or_has_no_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work, (cell,) = Work(None, "cpu", 32, 5), make_cells(["piecewise"])
    with pytest.raises(ConfigError, match="'piecewise' graphs are of a compiled step"):
        measure_cell(tiny_model(), work, cell)
    with pytest.raises(ConfigError, match="does not see the kernels of 'unfused'"):
        measure_row(work, make_cells(["full"], operations=["unfused"], compile=["aot_eager"])[0])
    monkeypatch.setattr(PieceCompiler, "compile", refuse)
    with pytest.raises(CaptureError, match="compiled no step"):
        measure_cell(tiny_model(), work, make_cells(["disabled"], compile=["aot_eager"])[0])


def refuse(*_: object) -> None:
    raise CaptureError("no")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_device_a_graph_is_submitted_sooner() -> None:
    work = Work(None, "cuda", 32, 30)
    full, eager = (measure_cell(tiny_model("cuda"), work, cell)["samples"] for cell in make_cells(["full", "disabled"]))
    assert torch.tensor(full["host_us"]).median() < torch.tensor(eager["host_us"]).median()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_the_device_a_process_measures_row_after_row() -> None:
    work, cells = Work("llama-3.2-1b", "cuda", 64, 5), make_cells(["full", "breakable", "disabled"], ["cuda"])
    cells += [replace(cell, attention="nothing") for cell in cells]
    rows = list(run_in_processes(work, cells, measure_row, isolate=False))
    assert ["unknown backend" in (row["failed"] or "") for row in rows] == [False] * 3 + [True] * 3
    assert all(row["machine"].startswith("NVIDIA") and not row["failed"] for row in rows[:3])
    assert sweep_result(rows).tables[0].rows[0][-1] > 1
