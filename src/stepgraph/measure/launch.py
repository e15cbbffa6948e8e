"""What a launch costs: one kernel by every path, graphs by their number of nodes, published figures beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from stepgraph.measure.clock import host_us
from stepgraph.measure.launch_graphs import COLUMNS, COUNTS, OVERLAPPED, Samples, measure_graphs, node_table, per_node
from stepgraph.measure.launch_paths import CALL_TO_START, DRIVER, HOST, launch_figures, launch_paths
from stepgraph.measure.published import beside
from stepgraph.measure.result import Figure, Result
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms import platform_for
from stepgraph.runtime.platforms.cuda import why_unavailable

TAPE_COLUMNS = {
    "replay": "µs of the host to replay as many of the smallest operator (neg_ of one element)",
    "record": "µs of the host to record them",
}
NO_OVERLAP = "This card knows no programmatic edges: compute capability 9.0 and later do."
_TAPE_REPEATS = 12


def measure_launch(device: str) -> Result:
    """device: `cuda`, or `cpu`, where a tape's operators stand in for launches.

    Raises:
        ConfigError: there is no CUDA device where one is asked for, or the driver refuses.
        TraceError: the profiler did not record the launches.
    """
    if device == "cpu":
        return _on_cpu()
    reason = why_unavailable()
    if reason is not None:
        raise ConfigError(f"device {device}: {reason}; --device cpu measures a tape instead")
    samples, per_nodes = measure_graphs()  # first: graphs launch slower once a profiler has run
    figures = launch_figures(launch_paths())
    ours = [figure for figure in figures if figure.name in (f"{DRIVER}: {CALL_TO_START}", f"{DRIVER}: {HOST}")]
    return Result(
        "launch",
        "Null kernels, one block of 128 threads for each multiprocessor where nothing else is said. Medians.",
        [*figures, *per_nodes],
        [node_table(samples, COLUMNS), beside(ours)],
        [comparable(ours), *([] if OVERLAPPED in samples else [NO_OVERLAP])],
        {"samples by nodes": samples},
    )


def comparable(ours: Sequence[Figure]) -> str:
    """Which of the published figures ours may be held against. ours: call to start, and host time of the call."""
    to_start, host = ours
    return (
        f"By definition `{to_start.name}` ({to_start.median:.2f} µs) is comparable with Vellaisamy et al., whose "
        "figures run from the call to the kernel's start. TaxBreak's, nearly twice as long on an H100, can be compared "
        f"by number alone. `{host.name}` ({host.median:.2f} µs) is another quantity, and near either by number only. "
        "Another host, driver or profiler moves all of them."
    )


def _on_cpu() -> Result:
    x = torch.zeros(1)
    eager = Figure(
        "operator", "µs", "Host time of neg_ of one element, eager, from Python.", host_us(x.neg_, 1000, warm=50)
    )
    samples = _tape_samples(x.neg_)
    per_nodes = [per_node(name, definition, samples[name]) for name, definition in TAPE_COLUMNS.items()]
    return Result(
        "launch_cpu",
        "The smallest torch operator on the CPU, and a tape of it.",
        [eager, *per_nodes],
        [node_table(samples, TAPE_COLUMNS), beside([])],
        ["On a CPU nothing is launched: launches, device time and a graph's capture need a GPU. Measured instead: "
         "what a tape's operator costs the host, recorded and replayed."],
        {"samples by nodes": samples},
    )  # fmt: skip


def _tape_samples(operator: Callable[[], object]) -> Samples:
    platform = platform_for("cpu")
    samples: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for count in COUNTS:

        def step(count: int = count) -> None:
            for _ in range(count):
                operator()

        def record(step: Callable[[], None] = step) -> None:
            platform.record(step, platform.new_pool())

        samples["record"][count] = host_us(record, _TAPE_REPEATS)
        recording, _ = platform.record(step, platform.new_pool())
        samples["replay"][count] = host_us(recording.replay, _TAPE_REPEATS)
    return dict(samples)
