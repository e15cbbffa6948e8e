"""The cells of a sweep over a Ray cluster of one machine with two workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from measure.sweep_cells import WORK

from stepgraph.measure.sweep.cells import Cell, Work, make_cells
from stepgraph.measure.sweep.measure_cell import measure_row
from stepgraph.measure.sweep.on_ray import RETRIES, require_ray, run_on_ray
from stepgraph.runtime import ConfigError

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of one with two workers, whose processes find what these tests import."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'stepgraph[ray]'")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield "auto"
        ray.shutdown()


def test_two_workers_measure_the_tapes_cells(cluster: str, demo_model: Path) -> None:
    work, cells = Work(str(demo_model), "cpu", 16, 2), make_cells(["FULL_DECODE_ONLY", "disabled"], rows=[1, 2])
    rows = list(run_on_ray(work, cells, measure_row, address=cluster))
    assert {Cell(**row["cell"]) for row in rows} == set(cells)
    assert [row["failed"] for row in rows] == [None] * 4
    assert {mode for row in rows for mode in row["resolved"]["steps"]} == {"FULL", "EAGER"}


def test_a_killed_workers_cell_is_run_again(cluster: str, tmp_path: Path) -> None:
    def killed_once(work: Work, cell: Cell) -> dict[str, Any]:
        from measure.sweep_cells import row

        tried = tmp_path / str(cell.rows)
        with tried.open("a") as file:
            file.write("x")
        if cell.rows == 2 and len(tried.read_text()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return row(work, cell)

    rows = list(run_on_ray(WORK, make_cells(["full"], rows=[1, 2, 3, 4]), killed_once, address=cluster))
    assert [row["failed"] for row in rows] == [None] * 4
    assert [len((tmp_path / str(count)).read_text()) for count in (1, 2, 3, 4)] == [1, 2, 1, 1]
    assert len({row["pid"] for row in rows}) == 4


def test_a_cell_that_always_kills_its_worker_is_a_row(cluster: str, tmp_path: Path) -> None:
    def deadly(work: Work, cell: Cell) -> dict[str, Any]:
        from measure.sweep_cells import measure

        (tmp_path / str(os.getpid())).touch()
        return measure(work, cell)

    cells = [Cell("full", name, None, 1) for name in ("die", "refuse", "live")]
    rows = {row["cell"]["attention"]: row for row in run_on_ray(WORK, cells, deadly, address=cluster)}
    assert "worker died" in rows["die"]["failed"].lower() and "\n" not in rows["die"]["failed"]
    assert rows["refuse"]["failed"] == "refused" and rows["live"]["failed"] is None
    assert len(list(tmp_path.iterdir())) == 2 + 1 + RETRIES


def test_a_cluster_without_a_gpu_is_refused(cluster: str) -> None:
    with pytest.raises(ConfigError, match="has no GPU"):
        list(run_on_ray(Work(None, "cuda", 16, 2), make_cells(["full"]), measure_row, address=cluster))


def test_an_address_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'stepgraph[ray]'")

    def refuse(**asked: Any) -> None:
        raise ConnectionError(f"nothing at {asked['address']}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match="no Ray cluster at 'nowhere:1': nothing"):
        list(run_on_ray(WORK, make_cells(["full"]), measure_row, address="nowhere:1"))


def test_without_ray_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        require_ray()
