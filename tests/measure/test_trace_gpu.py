"""Traces of real loops on a GPU, unmarked: each step against events around it in the same loop, and what the device did
against the account of the same step one by one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stepgraph.engine.model import DecoderModel
from stepgraph.engine.random_model import random_model
from stepgraph.measure.account import Accounted, Way, account
from stepgraph.measure.decode import DecodeRows
from stepgraph.measure.hugging_face import HuggingFaceStep
from stepgraph.measure.trace.launches import on_gpu
from stepgraph.measure.trace.loop import TraceAccount, account_for
from stepgraph.measure.trace.profiler import cuda_profiler
from stepgraph.measure.trace.read import read_any
from stepgraph.runtime import GraphConfig, Ladder

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
CONTEXT, COUNT = 512, 12
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return random_model("llama-3-8b", device="cuda", dtype=torch.bfloat16, max_positions=CONTEXT + 1)


def decode(model: DecoderModel, preset: str) -> Way:
    with torch.inference_mode():
        rows = DecodeRows(model, GraphConfig.preset(preset, ladder=Ladder.explicit([1])), rows=1, context=CONTEXT)
        rows.core.capture()
        rows.stage(1)
    return Way(preset, rows.step, rows.rewind)


def alone(way: Way) -> Accounted:
    with torch.inference_mode():
        (found,) = account([way], COUNT)
    return found


@dataclass(frozen=True)
class Loop:
    """events: µs of each step of the loop, from the end of the one before to its own. account: of the loop's trace."""

    events: Sequence[float]
    account: TraceAccount

    def median(self, part: str) -> float:
        return Accounted("loop", self.account.waterfalls).median(part)

    @property
    def off(self) -> float:
        """By how much the trace's times of steps differ from the events' of the same ones, in the median.

        The account leaves out a step or two at the ends; which is told by what fits best.
        """
        totals = [step.total for step in self.account.waterfalls]
        offsets = range(len(self.events) - len(totals) + 1)
        return min(
            statistics.median(abs(total / us - 1) for total, us in zip(totals, self.events[offset:], strict=False))
            for offset in offsets
        )


def in_a_loop(way: Way, path: Path) -> Loop:
    """Each step's result is read back, as a program does that prints tokens."""
    read = torch.zeros(1, device="cuda")
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(COUNT + 1)]
    profiler = cuda_profiler()
    with torch.inference_mode(), profiler:
        read.cpu()
        ends[0].record()
        for end in ends[1:]:
            way.before()
            way.step()
            read.cpu()
            end.record()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = [start.elapsed_time(stop) * 1e3 for start, stop in pairwise(ends)]
    return Loop(events, account_for(on_gpu(read_any(path), None)[0]))


def agrees(one: Accounted, loop: Loop) -> None:
    """What the device did is held against steps that ran at another time, what the host made of it is not: a shared
    host is up to half as fast again from one minute to the next."""
    assert len(loop.account.steps) >= COUNT - 3, loop.account.how
    assert loop.off <= 0.02, (loop.events, [step.total for step in loop.account.waterfalls])
    assert loop.median("busy") == pytest.approx(one.median("busy"), rel=0.02)


def test_a_loop_of_graphs(model: DecoderModel, tmp_path: Path) -> None:
    way = decode(model, "FULL_DECODE_ONLY")
    one, loop = alone(way), in_a_loop(way, tmp_path / "trace.json")
    agrees(one, loop)
    # What the host does between two steps is no part of a step on its own.
    assert loop.median("busy") + loop.median("gaps_device") == pytest.approx(
        one.median("busy") + one.median("gaps_device"), rel=0.02
    )
    assert {sum(launch.is_graph for launch in launches) for launches in loop.account.launches} == {1}


def test_an_eager_loop(model: DecoderModel, tmp_path: Path) -> None:
    way = decode(model, "NONE")
    agrees(alone(way), in_a_loop(way, tmp_path / "trace.json"))


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("llama", **LLAMA).save_pretrained(tmp_path)
    step = HuggingFaceStep(tmp_path, device="cuda", dtype=torch.bfloat16, rows=1, context=256)
    way = Way("transformers", step, lambda: None)
    agrees(alone(way), in_a_loop(way, tmp_path / "trace.json"))
