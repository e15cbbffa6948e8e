"""The peers compute what ours does, and every path of the benchmark that measures them runs, without a GPU's clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine.tiny import CONFIG, request, run_all, tiny_engine, tiny_model

from stepgraph.engine.model import DecoderModel
from stepgraph.engine.random_model import random_model

PEERS = ["gpt-fast-like", "transformers"]
LIMIT = {"median": 4e12, "p10": 4e12, "p90": 4e12}


def made(peers: ModuleType, name: str, model: DecoderModel, rows: int, context: int) -> Any:
    if name == "transformers":
        pytest.importorskip("transformers")
    return peers.PEERS[name](model, rows, context)


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_the_same_tokens(benchmark: Callable[[str], ModuleType], name: str) -> None:
    expected = run_all(tiny_engine(), [request(row, [1 + row], max_tokens=14) for row in range(3)])
    peer = made(benchmark("peers"), name, tiny_model(), 3, 16)
    peer.place(0)
    peer.tokens.copy_(torch.tensor([1, 2, 3]))
    found = []
    for _ in range(14):
        peer.step()
        found.append(peer.tokens.clone())
    assert torch.stack(found, dim=1).tolist() == expected


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_shared_embedding(benchmark: Callable[[str], ModuleType], name: str) -> None:
    config = replace(CONFIG, tie_word_embeddings=True)
    model = random_model(config, device="cpu", dtype=torch.float32, max_positions=16)
    peer = made(benchmark("peers"), name, model, 2, 16)
    peer.place(0)
    torch.testing.assert_close(peer.step()[1], benchmark("h200_peers").first_logits(model))


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_the_same_work_after_a_rewind(benchmark: Callable[[str], ModuleType], name: str) -> None:
    peer = made(benchmark("peers"), name, tiny_model(), 2, 13)
    first = peer.step().clone()
    peer.rewind()
    peer.tokens.fill_(1)
    torch.testing.assert_close(peer.step(), first)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch, benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The benchmark on a tiny shape, each step timed as one millisecond more than the last."""
    fused, module = benchmark("h200_fused"), benchmark("h200_peers")
    calls = iter(range(1, 100_000))

    def fake_ms(step: Callable[[], object], count: int, *, before: Callable[[], object]) -> list[float]:
        before()
        step()
        return [float(next(calls))] * count

    monkeypatch.setattr(fused, "device_ms", fake_ms)
    for shape in (module.BIG, module.SMALL):
        monkeypatch.setitem(fused.SHAPES, shape, CONFIG)
    monkeypatch.setattr(module, "load_model", lambda shape, **_: tiny_model())
    monkeypatch.setattr(module, "read_limit", lambda: LIMIT)
    monkeypatch.setattr(module, "CONTEXT", 16)
    return module


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, fused: ModuleType) -> None:
    common = sys.modules["common"]
    monkeypatch.setattr(fused, "write_result", lambda result: common.write_result(result, folder))


class AsItIs:
    """In place of the compiled step."""

    seconds, graphs, skips = 1.0, 1, 0

    def __init__(self, peer: Any) -> None:
        self.step, self.rewind = peer.step, peer.rewind


def test_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    module = without_a_gpu(monkeypatch, benchmark)
    written(monkeypatch, tmp_path, benchmark("h200_fused"))
    monkeypatch.setattr(module, "Compiled", AsItIs)
    assert module.main(["--rows", "1", "4"]) == 0
    small, result = (
        json.loads((tmp_path / f"h200_peers_{shape}.json").read_text(encoding="utf-8"))
        for shape in ("llama_3_2_1b", "llama_3_8b")
    )
    assert ([row[1] for row in small["rows"]], [row[1] for row in result["rows"]]) == ([1], module.SIZES)
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    first_peer = result["columns"].index("gpt-fast-like")
    assert [row[1] for row in result["rows"] if row[first_peer] is not None] == [1, 4]
    assert small["rows"][0][first_peer] is not None and small["rows"][0][-1] is None
    assert [row[-1] for row in result["rows"]] == [module.VLLM_MS.get(size) for size in module.SIZES]
    assert result["samples"]["llama-3-8b, 4"]["transformers"]["graphs"] == 1


def test_peers_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    benchmark: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = without_a_gpu(monkeypatch, benchmark)
    written(monkeypatch, tmp_path, benchmark("h200_fused"))
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails

    def broken(peer: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "Compiled", broken)
    assert module.main(["--rows", "1"]) == 1
    told = capsys.readouterr()
    assert "transformers is left out: transformers cannot be imported" in told.out
    assert "gpt-fast-like, 1 rows failed" in told.out and "no compiler" in told.err
    result = json.loads((tmp_path / "h200_peers_llama_3_8b.json").read_text(encoding="utf-8"))
    assert len(result["rows"]) == len(module.SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_compiled_as_a_whole(benchmark: Callable[[str], ModuleType], name: str) -> None:
    peers = benchmark("peers")
    expected = run_all(tiny_engine(), [request(0, [1], max_tokens=8)])
    peer = made(peers, name, tiny_model(), 1, 16)
    compiled = peers.Compiled(peer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    peer.place(0)
    peer.tokens.fill_(1)
    found = []
    for _ in range(8):
        compiled.step()
        found += peer.tokens.tolist()
    assert [found] == expected
