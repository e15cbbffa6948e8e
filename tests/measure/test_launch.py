"""`stepgraph launch`: traces, arithmetic, published figures, and the command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepgraph.cli.app import main
from stepgraph.measure import launch, launch_graphs
from stepgraph.measure import launch_paths as launch_paths_module
from stepgraph.measure.launch_graphs import COLUMNS, COUNTS, FEW, MANY, STEP, node_table, per_node
from stepgraph.measure.launch_paths import (
    LaunchPath,
    TracedLaunches,
    launch_figures,
    launch_paths,
    launches_of,
    trace_launches,
)
from stepgraph.measure.launch_picture import draw_launch
from stepgraph.measure.published import PUBLISHED, beside
from stepgraph.measure.result import Figure, Result
from stepgraph.measure.trace.kineto import parse_events
from stepgraph.runtime.errors import ConfigError

TO_START = Figure("driver: call to start", "µs", "From the call to the start.", [4.4, 4.5, 4.6])
HOST = Figure("driver: host time of the call", "µs", "Of the host.", [2.4, 2.5])


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def event(kind: str, name: str, start: float, length: float, correlation: int) -> dict[str, object]:
    arguments = {"device": 0, "stream": 7, "correlation": correlation}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "tid": 1, "args": arguments}


def test_launches_run_from_their_outermost_call_to_the_kernels_start() -> None:
    trace = parse_events(
        [
            event("cuda_runtime", "cudaLaunchKernel", 10.0, 3.0, 1),
            event("cuda_driver", "cuLaunchKernel", 11.0, 1.5, 1),
            event("kernel", "null", 14.5, 1.25, 1),
            event("cuda_runtime", "cudaDeviceSynchronize", 15.0, 2.0, 2),
            event("cuda_driver", "cuLaunchKernelEx", 20.0, 2.0, 3),
            event("kernel", "null", 24.0, 1.0, 3),
            event("gpu_memset", "Memset", 30.0, 1.0, 3),
            event("kernel", "launched before the trace", 40.0, 1.0, 9),
        ]
    )
    found = launches_of(trace)
    assert found.to_start == (4.5, 4.0) and found.duration == (1.25, 1.0)


def test_a_node_costs_what_nine_hundred_more_cost() -> None:
    figure = per_node("device", "between events", {FEW: [60.0, 62.0], MANY: [510.0, 602.0], 1: [3.0]})
    assert figure.samples == [0.5, 0.6] and figure.name == "device, per node"
    assert "1000 nodes less at 100, over 900: between events" in figure.definition


def test_nodes_are_tabled_as_medians_in_order() -> None:
    table = node_table({"replay": {10: [2.0, 4.0], 1: [1.0, 1.0]}, "upload": {1: [7.0], 10: [8.0]}}, COLUMNS)
    assert table.columns == ["nodes", "replay", "upload"]
    assert table.rows == [[1, 1.0, 7.0], [10, 3.0, 8.0]]
    assert set(table.definitions) == {"replay", "upload"}


def test_the_counts_hold_those_that_figures_are_taken_from() -> None:
    assert {FEW, STEP, MANY} <= set(COUNTS)


def test_published_figures_are_as_published() -> None:
    assert [(one.gpu, one.us) for one in PUBLISHED if one.gpu.startswith("H")] == [
        ("H100 PCIe", 2.3746), ("H100", 4.707), ("H200", 4.503),
    ]  # fmt: skip
    assert all(one.definition and one.source for one in PUBLISHED)


def test_ours_stand_beside_the_published_ones() -> None:
    table = beside([TO_START, HOST])
    rows = {row[0]: row for row in table.rows}
    assert rows["H100 PCIe"][4:6] == pytest.approx([4.5 / 2.3746, 2.45 / 2.3746])
    assert rows["H100 PCIe"][-1] == HOST.name
    assert rows["H200"][-1] == TO_START.name
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert beside([]).columns[-1] == "what they say it is"


def test_what_is_comparable_is_said_with_the_figures() -> None:
    text = launch.comparable([TO_START, HOST])
    assert "(4.50 µs) is comparable with Vellaisamy" in text and "(2.45 µs) is another quantity" in text


class StrawGraph:
    """A graph whose times follow from its number of nodes: half a µs of the device each, 0.4 µs with overlap."""

    open = 0

    def __init__(self, launch: str, count: int, stream: int) -> None:
        self.overlaps, self.count = launch == "overlapping", count
        self.capture_us, self.instantiate_us, self.upload_us = 1.0 * count, 3.0 * count, 0.9 * count
        StrawGraph.open += 1

    def programmatic_edges(self) -> int:
        return self.count - 1 if self.overlaps else 0

    def launch(self) -> float:
        return 3.0 + self.count * (0.4 if self.overlaps else 0.5)

    def close(self) -> None:
        StrawGraph.open -= 1


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def straw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A card of straw; whether it knows programmatic edges."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(launch_graphs, "can_be_programmatic", lambda: request.param)
    monkeypatch.setattr(
        launch_graphs,
        "null_launcher",
        lambda stream, waits, programmatic=False: "overlapping" if programmatic else "plain",
    )
    monkeypatch.setattr(launch_graphs, "NullGraph", StrawGraph)
    monkeypatch.setattr(
        launch_graphs, "_torch_graph", lambda launch, count, stream: SimpleNamespace(replay=lambda: 9.0)
    )
    monkeypatch.setattr(launch_graphs, "host_us", lambda call, count: [2.0] * count)
    monkeypatch.setattr(launch_graphs, "device_ms", lambda call, count, **more: [call() / 1e3] * count)
    return bool(request.param)


def test_graphs_are_measured_by_their_nodes(straw: bool) -> None:
    samples, figures = launch_graphs.measure_graphs()
    assert StrawGraph.open == 0
    expected = set(COLUMNS) - (set() if straw else {launch_graphs.OVERLAPPED})
    assert set(samples) == expected and all(list(by_count) == list(COUNTS) for by_count in samples.values())
    medians = {figure.name: figure.median for figure in figures}
    assert medians["device, per node"] == pytest.approx(0.5)
    assert medians["capture, per node"] == pytest.approx(1.0)
    assert medians["instantiate, per node"] == pytest.approx(3.0)
    assert medians["upload, per node"] == pytest.approx(0.9)
    assert medians["replay, per node"] == 0 and medians["replay, 330 nodes"] == 2.0
    assert medians["device, 330 nodes"] == pytest.approx(168)
    assert ("programmatic over plain, per node" in medians) == straw
    if straw:
        assert medians["device, programmatic, per node"] == pytest.approx(0.4)
        assert medians["programmatic over plain, per node"] == pytest.approx(0.8)


def test_other_edges_than_asked_for_are_refused(straw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrawGraph, "programmatic_edges", lambda graph: 5)
    with pytest.raises(ConfigError, match="of 1 null kernels has 5 programmatic edges, not 0"):
        launch_graphs.measure_graphs()
    StrawGraph.open = 0


def test_paths_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(launch_paths_module, "host_us", lambda call, count, **more: [call() or 0.5] * count)
    traced = TracedLaunches((4.5,) * 3, (1.2,) * 3)
    monkeypatch.setattr(launch_paths_module, "trace_launches", lambda call: traced)
    monkeypatch.setattr(launch_paths_module, "empty_call", lambda: 0.3)
    figures = launch_figures([LaunchPath(name, "A kernel", lambda name=name: order.append(name)) for name in "ab"])
    assert "".join(order) == "abba" * 5
    medians = {figure.name: figure.median for figure in figures}
    assert medians["a: call to start"] == 4.5 and medians["b: kernel's duration"] == 1.2
    assert medians["a: host time of the call"] == 0.5 and medians["an empty call through ctypes"] == 0.3
    assert all(len(figure.samples) == 300 for figure in figures if "host" in figure.name)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_whole_result(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {name: dict.fromkeys(COUNTS, [1.0, 2.0]) for name in COLUMNS}
    if not overlaps:
        del samples[launch_graphs.OVERLAPPED]
    monkeypatch.setattr(launch, "why_unavailable", lambda: None)
    monkeypatch.setattr(launch, "launch_paths", list)
    monkeypatch.setattr(launch, "launch_figures", lambda paths: [TO_START, HOST])
    monkeypatch.setattr(launch, "measure_graphs", lambda: (samples, []))
    told = json.loads(json.dumps(launch.measure_launch("cuda").to_json()))
    assert [row[0] for row in told["rows"]] == [TO_START.name, HOST.name]
    assert len(told["tables"]) == 2 and (launch.NO_OVERLAP in told["notes"]) != overlaps
    assert told["samples by nodes"]["replay"]["330"] == [1.0, 2.0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COUNTS", (1, 2, 4))
    monkeypatch.setattr(launch_graphs, "FEW", 2)
    monkeypatch.setattr(launch_graphs, "MANY", 4)


@pytest.mark.usefixtures("small")
def test_on_a_cpu_it_says_what_it_measures_instead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert call("launch", "--device", "cpu", "--json", "--picture", str(tmp_path / "a.png")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row[0] for row in told["rows"]] == ["operator", "replay, per node", "record, per node"]
    assert all(row[-1] for row in told["rows"])
    assert [row[0] for row in told["tables"][0]["rows"]] == [1, 2, 4]
    assert "On a CPU nothing is launched" in told["notes"][0]
    assert set(told["samples by nodes"]) == {"replay", "record"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("COLUMNS", "100")
    assert call("launch", "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert "Host time of neg_" in text and "2.37" in text and "4.71" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("launch", "--device", "cuda") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: device cuda: ") and "--device cpu measures" in error and error.count("\n") == 1
    assert call("launch", "--picture", "a.pdf") == 2
    assert ".png" in capsys.readouterr().err


def test_the_picture_shows_launches_and_graphs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = node_table({"device": {1: [3.0], 10: [8.0]}}, COLUMNS)
    figures = [TO_START, Figure.of("a count", 1.0, "µs", "One."), Figure.of("device, per node", 0.5, "µs", "A node.")]
    draw_launch(Result("launch", "Null kernels.", figures, [table], machine="a machine"), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.alone
def test_every_path_launches_once() -> None:
    for path in launch_paths():
        found = trace_launches(path.launch)
        assert len(found.to_start) == len(found.duration) == 300, path.name
        assert min(found.to_start) > 0, path.name


@pytest.mark.gpu
@pytest.mark.alone
def test_launching_costs_microseconds() -> None:
    figures = {figure.name: figure.median for figure in launch_figures(launch_paths()[:1])}
    assert 1 < figures["driver: call to start"] < 50
    assert figures["an empty call through ctypes"] < figures["driver: host time of the call"] < 50


@pytest.mark.gpu
@pytest.mark.alone
def test_graphs_cost_less_a_node_than_launches() -> None:
    result = launch.measure_launch("cuda")
    medians = {figure.name: figure.median for figure in result.figures}
    assert 0.1 < medians["device, per node"] < 3
    assert medians["replay, per node"] < 0.1 * medians["driver: host time of the call"]
    assert [row[0] for row in result.tables[0].rows] == list(COUNTS)
