"""Models named by their hub id: found in the hub library's cache, never fetched here; what is missing is one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from engine.hf import write_checkpoint
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.errors import ModelError
from stepgraph.engine.hub import local_path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's library, which stays offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_cached_model_runs_offline_by_its_id(hub_cache: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / "models--some-org--tiny.model"
    write_checkpoint(repository / "snapshots" / revision, "qwen2")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    llm = LLM("some-org/tiny.model", device="cpu", max_num_seqs=1)
    assert llm.config.architecture == "qwen2"
    assert len(llm.generate("hi", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    shutil.rmtree(repository)
    with pytest.raises(ModelError, match="hub does not give it"):
        local_path("some-org/tiny.model")


def test_a_missing_model_is_one_line(hub_cache: Path) -> None:
    with pytest.raises(ModelError) as caught:
        local_path("some-org/none")
    assert str(caught.value).startswith("some-org/none is no local path, and the Hugging Face hub does not give it (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model",
    ["none", "/some-org/none", "a/b/c", "../none", "org/model.gguf", "some org/none", "", Path("some-org/none")],
)
def test_what_cannot_be_an_id_never_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, model: str | Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    if model == "":  # the current directory
        assert local_path(model) == Path()
        return
    with pytest.raises(ModelError, match="does not exist; give a model directory, a .gguf file, or a hub id"):
        local_path(model)


def test_a_local_path_comes_before_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org" / "model").mkdir(parents=True)
    assert local_path("some-org/model") == Path("some-org/model")


def test_only_what_is_read_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_path("some-org/model") == tmp_path
    ((repository, patterns),) = asked
    wanted = {
        *("config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    other = {
        *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.safetensors", "tokenizer.model"),
        *("original/consolidated.00.pth", "onnx/config.json", "model.gguf", "training_args.bin", "modeling_x.py"),
    }
    assert repository == "some-org/model"
    assert set(filter_repo_objects(wanted | other, allow_patterns=patterns)) == wanted
