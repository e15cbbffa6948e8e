"""The account of an engine's decode step: graph and eager on the same rows and inputs, held against measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.model import DecoderModel
from stepgraph.measure.account import Accounted, Way, account
from stepgraph.measure.compute import DEFINITION as COMPUTE_DEFINITION
from stepgraph.measure.compute import compute_limit
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.stamps import CrossCheck, Stamped, cross_check
from stepgraph.measure.stream import DEFINITION as READ_DEFINITION
from stepgraph.measure.stream import read_limit
from stepgraph.measure.work import Floor, Limits, decode_work, floor
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder
from stepgraph.runtime.runner import GraphRunner

STEPS = 60


@dataclass(frozen=True)
class DecodeAccount:
    """what: names the step. limits: as measured, for the result's file."""

    what: str
    found: tuple[Accounted, ...]
    floor: Floor
    check: CrossCheck
    limits: dict[str, Any]


@torch.inference_mode()
def account_decode(
    model: DecoderModel,
    name: str,
    *,
    rows: int = 1,
    context: int = 512,
    count: int = STEPS,
    limits: dict[str, Any] | None = None,
) -> DecodeAccount:
    """Both ways `count` times. limits: as `measure_limits` gives them; by default measured now.

    Raises:
        ConfigError: no CUDA device, no Triton, or a size that cannot work.
        TraceError: the profiler did not record the steps.
    """
    if model.device.type != "cuda":
        raise ConfigError(f"account: a timeline needs a CUDA device; the model is on {model.device}")
    limits = limits or measure_limits()
    one_graph = GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.explicit([rows]))
    decode = DecodeRows(model, one_graph, rows=rows, context=context)
    decode.core.capture()
    decode.stage(rows)
    eager = decode.another(GraphConfig.preset("NONE"))
    found = account(
        [Way("eager", lambda: decode.step(eager), decode.rewind), Way("graph", decode.step, decode.rewind)], count
    )
    stamped = Stamped(decode.runner._run.step, model.device)
    runner = GraphRunner(stamped, decode.buffers, decode.runner.config, pool=decode.runner.pool)
    runner.capture()
    decode.stage(rows)  # a capture resets the buffers
    check = cross_check(stamped, lambda: decode.step(runner), decode.rewind, count)
    work = decode_work(model.config, rows=rows, context=context, itemsize=model.dtype.itemsize)
    least = floor(work, Limits(limits["read"]["median"], limits["compute"]["median"]))
    made_of = f"{model.operations.name} operations, {decode.core.attention.name} attention"
    what = f"A decode step of {name}, {rows} {'row' if rows == 1 else 'rows'} at a context of {context} ({made_of})"
    return DecodeAccount(what, tuple(found), least, check, limits)


def measure_limits() -> dict[str, Any]:
    """Bytes and floating-point operations per second with their spread and what they are."""
    return {
        "read": {**read_limit(), "definition": READ_DEFINITION},
        "compute": {**compute_limit(), "definition": COMPUTE_DEFINITION},
    }
