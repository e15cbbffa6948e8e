"""What a graph costs by its number of nodes: capture, instantiate, upload, replay on the host, time on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from stepgraph.measure.clock import device_ms, host_us
from stepgraph.measure.null_kernel import NullGraph, can_be_programmatic, null_launcher
from stepgraph.measure.result import Figure, Rows
from stepgraph.measure.stats import in_turns, quantiles
from stepgraph.runtime.errors import ConfigError

STEP = 330
"""Launches of a decode step of an 8B model whose layers have ten each."""
FEW, MANY = 100, 1000
"""Between these two numbers of nodes the cost of one more is taken."""
COUNTS = (1, 10, FEW, STEP, MANY)
BUILDS, REPLAYS, ROUNDS = 12, 200, 60
_HOLD_CYCLES = 100_000  # some 50 µs, in which the host queues what is timed

DEVICE, OVERLAPPED = "device", "device, programmatic"
COLUMNS = {
    "replay": "µs of the host for one launch of the graph, straight from the driver, the device idle before",
    "torch's replay": "µs of the host for CUDAGraph.replay(), which may also update the random generators' state",
    DEVICE: "µs between events before and after the graph, queued behind other work; kernels follow one another",
    OVERLAPPED: "µs between the same events; a kernel may start before the one in front has ended, and waits for it",
    "capture": "µs of the host to capture, each node launched from Python through ctypes",
    "instantiate": "µs of the host to make the captured graph executable",
    "upload": "µs until the executable graph is on the device",
}

Samples = Mapping[str, Mapping[int, Sequence[float]]]
"""µs by column and number of nodes."""


def measure_graphs() -> tuple[dict[str, dict[int, list[float]]], list[Figure]]:
    """µs by column of `COLUMNS` and number of nodes; and figures: at `STEP` nodes, and what one more node costs.

    Raises:
        ConfigError: the driver refuses, or makes other edges than were asked for.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        raw, overlaps = int(stream.cuda_stream), can_be_programmatic()
        plain = null_launcher(raw, waits=overlaps)
        samples: dict[str, dict[int, list[float]]] = defaultdict(dict)
        graphs = {DEVICE: {count: NullGraph(plain, count, raw) for count in COUNTS}}
        if overlaps:
            launch = null_launcher(raw, waits=True, programmatic=True)
            graphs[OVERLAPPED] = {count: NullGraph(launch, count, raw) for count in COUNTS}
        _check_edges(graphs)
        for count in COUNTS:
            samples["replay"][count] = host_us(graphs[DEVICE][count].launch, REPLAYS)
            samples["torch's replay"][count] = host_us(_torch_graph(plain, count, stream).replay, REPLAYS)
            for name, by_count in graphs.items():
                samples[name][count] = [
                    ms * 1e3 for ms in device_ms(by_count[count].launch, REPLAYS // 4, before=_hold)
                ]
            built = [_build(plain, count, raw) for _ in range(BUILDS)][2:]  # the first grow the driver's own memory
            for place, column in enumerate(("capture", "instantiate", "upload")):
                samples[column][count] = [one[place] for one in built]
        device = _device_per_node(graphs)
        for by_count in graphs.values():
            for graph in by_count.values():
                graph.close()
    hosts = [per_node(name, COLUMNS[name], samples[name]) for name in ("replay", "capture", "instantiate", "upload")]
    return dict(samples), [*_step_figures(samples), *device, *hosts]


def per_node(name: str, definition: str, by_count: Mapping[int, Sequence[float]]) -> Figure:
    """What one more node costs: between `FEW` and `MANY` nodes."""
    few, many = by_count[FEW], by_count[MANY]
    samples = [(m - f) / (MANY - FEW) for f, m in zip(few, many, strict=True)]
    return Figure(f"{name}, per node", "µs", _per_node_is(definition), samples)


def node_table(samples: Samples, definitions: Mapping[str, str]) -> Rows:
    """Medians by number of nodes."""
    columns = [column for column in definitions if column in samples]
    counts = sorted(samples[columns[0]])
    rows = [[count, *(quantiles(samples[column][count])["median"] for column in columns)] for count in counts]
    title = "graphs by number of nodes, medians in µs"
    return Rows(title, ["nodes", *columns], rows, {column: definitions[column] for column in columns})


def _step_figures(samples: Samples) -> list[Figure]:
    return [
        Figure(f"{name}, {STEP} nodes", "µs", f"{definition}.", samples[name][STEP])
        for name, definition in COLUMNS.items()
        if name in samples
    ]


def _device_per_node(graphs: Mapping[str, Mapping[int, NullGraph]]) -> list[Figure]:
    def measure(name: str) -> float:
        few, many = (device_ms(graphs[name][n].launch, 1, before=_hold, warm=0)[0] for n in (FEW, MANY))
        return (many - few) * 1e3 / (MANY - FEW)

    names = {DEVICE: _per_node_is(COLUMNS[DEVICE]), OVERLAPPED: _per_node_is(COLUMNS[OVERLAPPED])}
    if OVERLAPPED not in graphs:
        return [Figure(f"{DEVICE}, per node", "µs", names[DEVICE], [measure(DEVICE) for _ in range(ROUNDS)])]
    pairs = in_turns(ROUNDS, lambda: measure(DEVICE), lambda: measure(OVERLAPPED))
    plain, overlapped = zip(*pairs, strict=True)
    ratio_is = "Of the two above, measured in turns; the median of the rounds' ratios."
    return [
        Figure(f"{DEVICE}, per node", "µs", names[DEVICE], plain),
        Figure(f"{OVERLAPPED}, per node", "µs", names[OVERLAPPED], overlapped),
        Figure("programmatic over plain, per node", "ratio", ratio_is, [b / a for a, b in pairs]),
    ]


def _check_edges(graphs: Mapping[str, Mapping[int, NullGraph]]) -> None:
    for name, by_count in graphs.items():
        for count, graph in by_count.items():
            found, expected = graph.programmatic_edges(), count - 1 if name == OVERLAPPED else 0
            if found != expected:
                raise ConfigError(f"a graph of {count} null kernels has {found} programmatic edges, not {expected}")


def _build(launch: Callable[[], None], count: int, stream: int) -> tuple[float, float, float]:
    graph = NullGraph(launch, count, stream)
    graph.close()
    return graph.capture_us, graph.instantiate_us, graph.upload_us


def _torch_graph(launch: Callable[[], None], count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(count):
            launch()
    return graph


def _hold() -> None:
    torch.cuda._sleep(_HOLD_CYCLES)


def _per_node_is(definition: str) -> str:
    return f"At {MANY} nodes less at {FEW}, over {MANY - FEW}: {definition}."
