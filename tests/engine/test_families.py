"""Every family on a small random checkpoint that transformers made: the same greedy tokens. The same from GGUF."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.gguf_files import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, TOKENS, write_gguf
from engine.hf import gaps, greedy, write_checkpoint

from stepgraph.engine import LLM, SamplingParams
from stepgraph.engine.checkpoint import load_checkpoint
from stepgraph.engine.config import ModelConfig
from stepgraph.engine.rope import read_rope
from stepgraph.ops.layer import inverse_frequencies
from stepgraph.runtime import ConfigError

NEW, TIE = 24, 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
WINDOW = 20  # fewer than the tokens of the shortest prompt and its answer: decoding leaves it too
PROMPTS = [[1, 2, 3], [token * 7919 % 256 for token in range(100)], [token * 31 % 256 for token in range(33)]]
NO_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the same without what the case is about: config.json entries that take it away."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


def qwen_window(**more: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0, **more}


SMOLLM2 = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
LLAMA3 = scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = scaled("yarn", original_max_position_embeddings=40)
CASES = {
    "llama": Case("llama"),
    "smollm2": Case("llama", {"tie_word_embeddings": True, **SMOLLM2}),
    "llama-sharded": Case("llama", {"shard_size": "40KB", "head_dim": 16}),
    "llama3": Case("llama", LLAMA3, NO_SCALING),
    "linear": Case("llama", {"max_position_embeddings": 40, **scaled("linear")}, NO_SCALING),
    "yarn": Case("llama", {"max_position_embeddings": 40, **YARN}, NO_SCALING),
    "dynamic": Case("llama", scaled("dynamic")),
    "mistral": Case("mistral", {"sliding_window": WINDOW, "shard_size": "40KB"}, {"sliding_window": None}),
    "mistral-nemo": Case("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": Case("qwen2", {"shard_size": "40KB"}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Case("qwen2", qwen_window(), {"use_sliding_window": False, "layer_types": None}),
    "qwen2-yarn": Case("qwen2", YARN, NO_SCALING),
    "qwen3": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-window": Case("qwen3", qwen_window(head_dim=16), {"use_sliding_window": False, "layer_types": None}),
}


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    chosen = CASES[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), chosen.family, **chosen.changes)
    assert (folder / "model.safetensors.index.json").is_file() == ("shard_size" in chosen.changes)
    return chosen, folder


@pytest.fixture(scope="module")
def expected(case: tuple[Case, Path]) -> list[list[int]]:
    return [greedy(case[1], prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_greedy_tokens_equal_transformers(case: tuple[Case, Path], expected: list[list[int]], graphs: str) -> None:
    llm = LLM(case[1], device="cpu", graphs=graphs, max_num_seqs=3, chunk_tokens=48)  # the long prompt is cut in three
    assert answers(llm) == expected
    assert llm.stats.by_mode() == {"FULL" if graphs == "full" else "EAGER": llm.stats.steps}


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.without], indirect=True)
def test_the_prompts_are_long_enough(case: tuple[Case, Path], expected: list[list[int]], tmp_path: Path) -> None:
    """Without its window or its scaling the same checkpoint says something else."""
    chosen, folder = case
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    fields = {**json.loads((folder / "config.json").read_text()), "max_position_embeddings": 128, **chosen.without}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    others = [greedy(tmp_path, prompt, NEW) for prompt in PROMPTS]
    assert all(other != tokens for other, tokens in zip(others, expected, strict=True))


def test_half_precision_runs_graphed_as_eagerly(case: tuple[Case, Path]) -> None:
    full, eager = (
        LLM(case[1], device="cpu", dtype="bfloat16", graphs=graphs, max_num_seqs=3) for graphs in ("full", "disabled")
    )
    assert full.core.model.dtype == full.core.kv_cache.dtype == torch.bfloat16
    assert answers(full) == answers(eager)


@pytest.mark.gpu
@pytest.mark.parametrize("operations", ["reference", "unfused", "fused"])
def test_on_a_gpu_in_float32(case: tuple[Case, Path], operations: str) -> None:
    """Sums are ordered otherwise there: where two tokens are within a thousandth either may be taken."""
    llm = LLM(case[1], device="cuda", dtype="float32", operations=operations, max_num_seqs=3, chunk_tokens=48)
    for prompt, answer in zip(PROMPTS, answers(llm), strict=True):
        assert max(gaps(case[1], prompt, answer)) < TIE


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_auto_is_the_stored_dtype_on_a_gpu(tmp_path: Path, family: str) -> None:
    llm = LLM(write_checkpoint(tmp_path, family, stored=torch.float16), device="cuda", max_num_seqs=1)
    assert llm.core.model.dtype == torch.float16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_may_be_loaded_as_they_are_stored(tmp_path: Path, stored: torch.dtype) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", stored=stored)
    weights = load_checkpoint(folder, dtype=None, device="cpu").weights
    assert {tensor.dtype for tensor in weights.values()} == {stored}
    assert LLM(folder, device="cpu", max_num_seqs=1).core.model.dtype == torch.float32  # auto, on a CPU


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: 'int8' is not one of auto, float32, bfloat16, float16"):
        LLM("nowhere", device="cpu", dtype="int8")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_gguf_tokens_equal_transformers_on_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, graphs: str
) -> None:
    import transformers
    from safetensors.torch import save_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    metadata = {"attention.key_length": HIDDEN // HEADS, "attention.value_length": HIDDEN // HEADS}
    weights = write_gguf(tmp_path / "m.gguf", architecture=architecture, metadata=metadata, tied=False)
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    tensors = {name: torch.from_numpy(values.copy()) for name, values in weights.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(tmp_path / "m.gguf", device="cpu", graphs=graphs, max_num_seqs=3)
    assert answers(llm) == [greedy(tmp_path, prompt, NEW) for prompt in PROMPTS]


def gguf_config(tmp_path: Path, metadata: dict[str, Any], extra: dict[str, Any] | None = None) -> ModelConfig:
    write_gguf(tmp_path / "m.gguf", metadata=metadata, extra=extra)
    return load_checkpoint(tmp_path / "m.gguf", dtype=torch.float32, device="cpu", cache_dir=tmp_path).config


def test_gguf_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    """The converter writes that scaling as factors: the same frequencies come out, but for float32's rounding."""
    rope = read_rope({**LLAMA3, "rope_theta": 10000.0}, HIDDEN // HEADS, 128, "test")
    plain = inverse_frequencies(HIDDEN // HEADS, 10000.0)
    factors = (plain / torch.tensor(rope.frequencies)).numpy()
    config = gguf_config(tmp_path, {"rope.freq_base": 10000.0}, {"rope_freqs.weight": factors})
    assert config.rope_frequencies == pytest.approx(rope.frequencies, rel=1e-6)
    assert config.max_position_embeddings == 128


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_scaling_equals_hugging_faces(tmp_path: Path, kind: str) -> None:
    original = {"rope.scaling.original_context_length": 64} if kind == "yarn" else {}
    config = gguf_config(tmp_path, {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, **original})
    more = {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    rope = read_rope(scaled(kind, rope_theta=50000.0, **more), HIDDEN // HEADS, 128, "test")
    found = (config.rope_frequencies, config.rope_scale, config.max_position_embeddings)
    assert found == (rope.frequencies, rope.scale, rope.max_positions)
