"""Time per output token with graphs on and off: one engine at a time, in turns, host and device apart."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from stepgraph.engine.core import EngineCore
from stepgraph.engine.graphs import Graphs, graph_config
from stepgraph.engine.kv_blocks import blocks_for
from stepgraph.engine.model import DecoderModel, attention_shape
from stepgraph.engine.request import Request
from stepgraph.engine.scheduler import most_tokens
from stepgraph.measure.decode import GREEDY
from stepgraph.measure.result import Figure, Result, Rows
from stepgraph.measure.stats import in_turns
from stepgraph.ops.attention import get_backend
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder
from stepgraph.runtime.runner import GraphRunner

CHUNK_TOKENS = 512
WARM = 4
"""Decode steps of each engine that are not counted."""


@dataclass(frozen=True)
class Workload:
    """rows: requests that decode at once. prompt: tokens of each. tokens: decode steps that are timed.
    rounds: engines of each kind.
    """

    rows: int
    prompt: int
    tokens: int
    rounds: int

    def __post_init__(self) -> None:
        if min(self.rows, self.prompt, self.tokens, self.rounds) < 1:
            raise ConfigError(
                f"bench: {self.rows} rows, {self.prompt} prompt tokens, {self.tokens} tokens, {self.rounds} rounds; "
                f"all start at 1"
            )

    @property
    def longest(self) -> int:
        """Tokens that a request may come to: the first ones decode while the others still prefill."""
        a_step = most_tokens(CHUNK_TOKENS, self.rows) - self.rows
        prefill_steps = math.ceil(self.rows * self.prompt / a_step) + self.rows
        return self.prompt + prefill_steps + WARM + self.tokens + 1


@dataclass
class Run:
    """One engine's decode steps, in ms each: token (the host's clock, from one token to the next), host (of it, what
    the host did not wait for the device), device (from the step's first work on it to its last; empty without one).
    """

    token: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


class TimedRunner:
    """A runner that notes for each call how long the host waited for the device, and the device's own time.

    It waits for each step, as reading its tokens does.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.waited: list[float] = []  # seconds
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._on_device = runner.buffers.device.type == "cuda"

    def __call__(self, **call: Any) -> Any:
        return self._timed(lambda: self.runner(**call))

    def again(self) -> Any:
        return self._timed(self.runner.again)

    def _timed(self, step: Callable[[], Any]) -> Any:
        if not self._on_device:
            self.waited.append(0.0)
            return step()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = step()
        stop.record()
        submitted = time.perf_counter()
        stop.synchronize()
        self.waited.append(time.perf_counter() - submitted)
        self.events.append((start, stop))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def bench(model: DecoderModel, workload: Workload, graphs: Graphs, attention: str | None = None) -> Result:
    """Decode with graphs and without, an engine made and torn down each time, AB, BA, …

    Raises:
        ConfigError: graphs that capture no decode step, or sizes that cannot work.
    """
    runs: dict[str, list[Run]] = {"graphs": [], "eager": []}

    def once(kind: str) -> float:
        runs[kind].append(run_engine(model, workload, graphs if kind == "graphs" else "disabled", attention))
        return statistics.median(runs[kind][-1].token)

    pairs = in_turns(workload.rounds, lambda: once("graphs"), lambda: once("eager"))
    if runs["graphs"][0].resolved["steps"].get("EAGER"):
        raise ConfigError(f"bench: --graphs {graphs} captures no decode step here; choose full or FULL_DECODE_ONLY")
    return bench_result(runs, pairs, workload, model)


@torch.inference_mode()
def run_engine(model: DecoderModel, workload: Workload, graphs: Graphs, attention: str | None = None) -> Run:
    """Make an engine, let it prefill, time its decode steps, and tear it down."""
    core = _make_engine(model, workload, graphs, attention)
    report = core.capture()
    for index in range(workload.rows):
        prompt = [(7 * index + 13 * place) % model.config.vocab_size for place in range(workload.prompt)]
        core.scheduler.add(Request(index, prompt, GREEDY, 7, workload.longest - workload.prompt))
    while core.scheduler.waiting or core.scheduler.prefilling:
        core.step()
    for _ in range(WARM):
        core.step()
    before = core.runner.stats.by_mode()
    timed, found = TimedRunner(core.runner), Run()
    core.runner = cast(GraphRunner, timed)
    for _ in range(workload.tokens):
        started = time.perf_counter()
        produced = core.step()
        found.token.append((time.perf_counter() - started) * 1e3)
        assert len(produced) == workload.rows, "a request ended or was preempted"
    core.runner = timed.runner
    found.host = [token - waited * 1e3 for token, waited in zip(found.token, timed.waited, strict=True)]
    found.device = [start.elapsed_time(stop) for start, stop in timed.events]
    config, modes = core.resolution.config, core.runner.stats.by_mode()
    found.changes = tuple(str(change) for change in core.resolution.changes)
    found.resolved = {
        "decode": config.decode.backend.value,
        "prefill": config.prefill.backend.value,
        "steps": {mode: count - before.get(mode, 0) for mode, count in modes.items() if count > before.get(mode, 0)},
        "graphs": len(report.graphs),
        "capture seconds": report.seconds,
        "attention": core.attention.name,
        "operations": model.operations.name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    core.runner.release()
    del core, timed
    gc.collect()
    return found


def bench_result(
    runs: dict[str, list[Run]], pairs: Sequence[tuple[float, float]], workload: Workload, model: DecoderModel
) -> Result:
    """pairs: of each round the median time per token of graphs and of eager, in ms."""
    on_device = model.device.type == "cuda"
    figures = []
    for kind, made in runs.items():
        figures.append(Figure(f"{kind}: per token", "ms", _PER_TOKEN, _all(made, lambda run: run.token)))
        if on_device:
            figures += [
                Figure(f"{kind}: host", "ms", _HOST, _all(made, lambda run: run.host)),
                Figure(f"{kind}: device", "ms", _DEVICE, _all(made, lambda run: run.device)),
            ]
    figures.append(Figure("eager / graphs", "", _RATIO, [eager / graphs for graphs, eager in pairs]))
    notes = [] if on_device else [_NO_DEVICE]
    notes += [f"changed: {change}" for change in runs["graphs"][0].changes]
    rows = "1 row" if workload.rows == 1 else f"{workload.rows} rows"
    return Result(
        name="bench",
        definition=f"Greedy decoding of {rows}, {workload.prompt} prompt tokens each, {workload.tokens} steps an "
        f"engine, {len(pairs)} engines of each kind in turns (AB, BA); one lives at a time, the weights stay.",
        figures=figures,
        tables=[_resolved(runs)],
        notes=notes,
        more={"pairs": [list(pair) for pair in pairs], "resolved": {k: made[0].resolved for k, made in runs.items()}},
    )


_PER_TOKEN = "from one token of a request to its next, by the host's clock: one engine step"
_HOST = "of it, what the host did not spend waiting for the device"
_DEVICE = "from the step's first work on the device to the end of its last, by events; eager steps idle in between"
_RATIO = "time per token, the medians of two engines of one round"
_NO_DEVICE = (
    "Without a GPU the host computes the step itself, and the tape stands for a graph: what is saved is dispatching, "
    "no launches, and there is no device time apart from the host's."
)


def _make_engine(model: DecoderModel, workload: Workload, graphs: Graphs, attention: str | None) -> EngineCore:
    rows, longest = workload.rows, workload.longest
    config = graph_config(
        graphs,
        None if graphs in ("disabled", "NONE") else Ladder.explicit([rows]),
        max_num_seqs=rows,
        step_tokens=most_tokens(CHUNK_TOKENS, rows),
        device=model.device,
    )
    return EngineCore(
        model,
        get_backend(attention, model.device, attention_shape(model.config), max_rows=rows, max_len=longest),
        config,
        max_num_seqs=rows,
        max_model_len=longest,
        num_blocks=rows * blocks_for(longest) + 1,
        chunk_tokens=CHUNK_TOKENS,
    )


def _all(made: Sequence[Run], of: Callable[[Run], list[float]]) -> list[float]:
    return [sample for run in made for sample in of(run)]


def _resolved(runs: dict[str, list[Run]]) -> Rows:
    columns = ["engine", *runs["graphs"][0].resolved]
    rows = []
    for kind, made in runs.items():
        values = dict(made[0].resolved)
        values["steps"] = ", ".join(f"{mode} {count}" for mode, count in values["steps"].items())
        rows.append([kind, *values.values()])
    definitions = {
        "decode": "the backend that its graphs have after what the attention backend allows; prefill the same",
        "steps": "timed steps of one engine by how they ran",
    }
    return Rows("what ran", columns, rows, definitions)
