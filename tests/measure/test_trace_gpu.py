"""Traces of real loops on a GPU, unmarked, against the account of the same steps one by one."""

from __future__ import annotations

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
from stepgraph.measure.trace.read import read_any
from stepgraph.runtime import GraphConfig, Ladder

pytestmark = pytest.mark.gpu
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


def in_a_loop(way: Way, path: Path) -> TraceAccount:
    """Each step's result is read back, as a program does that prints tokens."""
    read = torch.zeros(1, device="cuda")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with torch.inference_mode(), profiler:
        for _ in range(COUNT):
            way.before()
            way.step()
            read.cpu()
    profiler.export_chrome_trace(str(path))
    return account_for(on_gpu(read_any(path), None)[0])


def test_a_loop_of_graphs(model: DecoderModel, tmp_path: Path) -> None:
    way = decode(model, "FULL_DECODE_ONLY")
    one, found = alone(way), in_a_loop(way, tmp_path / "trace.json")
    assert len(found.steps) >= COUNT - 3, found.how
    loop = Accounted("loop", found.waterfalls)
    # What the host does between two steps is no part of a step on its own.
    assert loop.median("busy") + loop.median("gaps_device") == pytest.approx(
        one.median("busy") + one.median("gaps_device"), rel=0.02
    )
    assert {sum(launch.is_graph for launch in launches) for launches in found.launches} == {1}


def test_an_eager_loop(model: DecoderModel, tmp_path: Path) -> None:
    way = decode(model, "NONE")
    one, found = alone(way), in_a_loop(way, tmp_path / "trace.json")
    assert len(found.steps) >= COUNT - 3, found.how
    loop = Accounted("loop", found.waterfalls)
    assert loop.median("busy") == pytest.approx(one.median("busy"), rel=0.02)
    assert loop.median("total") == pytest.approx(one.median("total"), rel=0.02)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("llama", **LLAMA).save_pretrained(tmp_path)
    step = HuggingFaceStep(tmp_path, device="cuda", dtype=torch.bfloat16, rows=1, context=256)
    way = Way("transformers", step, lambda: None)
    one, found = alone(way), in_a_loop(way, tmp_path / "trace.json")
    assert len(found.steps) >= COUNT - 3, found.how
    loop = Accounted("loop", found.waterfalls)
    assert loop.median("busy") == pytest.approx(one.median("busy"), rel=0.02)
    assert loop.median("total") == pytest.approx(one.median("total"), rel=0.02)
