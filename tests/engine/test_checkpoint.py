import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from stepgraph.engine.checkpoint import Checkpoint, load_checkpoint
from stepgraph.engine.config import FAMILIES, parse_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.tensors import expected_tensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
Write = Callable[..., Path]


def load(path: Path, **options: Any) -> Checkpoint:
    return load_checkpoint(path, **{"dtype": torch.float32, "device": "cpu", **options})


def random_weights(**changes: Any) -> dict[str, torch.Tensor]:
    config = parse_config({**LLAMA, **changes}, FAMILIES[0], "test")
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model directory; `weights` may be one dict, or file name -> dict for a sharded one."""

    def write_directory(weights: Any, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.save(str(tmp_path / "tokenizer.json"))
        if isinstance(next(iter(weights.values())), dict):
            for file, tensors in weights.items():
                save_file(tensors, tmp_path / file)
            weight_map = {name: file for file, tensors in weights.items() for name in tensors}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        else:
            save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return write_directory


def shards(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(weights.items()):
        parts["ab"[index % 2] + ".safetensors"][name] = tensor
    return parts


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_loads_what_was_written(write: Write, tied: bool, sharded: bool) -> None:
    weights = random_weights(tie_word_embeddings=tied)
    seen: list[tuple[int, int, str]] = []
    path = write(shards(weights) if sharded else weights, tie_word_embeddings=tied)
    checkpoint = load(path, progress=lambda *step: seen.append(step))
    assert checkpoint.weights.keys() == weights.keys() and ("lm_head.weight" in weights) is not tied
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in weights.items())
    assert [done for done, _, _ in seen] == list(range(1, len(weights) + 1))
    assert {total for _, total, _ in seen} == {len(weights)} and {name for _, _, name in seen} == weights.keys()
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("naïve")) == "naïve"
    assert checkpoint.tokenizer.eos_token_ids == checkpoint.config.eos_token_ids == (2,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_converts_the_dtype(write: Write, dtype: torch.dtype) -> None:
    weights = random_weights()
    loaded = load(write(weights), dtype=dtype).weights
    assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in weights.items())


def test_weights_are_mapped_privately(write: Write) -> None:
    path = write(random_weights())
    before = (path / "model.safetensors").read_bytes()
    load(path).weights["model.norm.weight"].zero_()
    assert (path / "model.safetensors").read_bytes() == before


def test_rotary_buffers_of_old_checkpoints_are_ignored(write: Write) -> None:
    weights = random_weights()
    old = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert load(write(old)).weights.keys() == weights.keys()


def test_a_tied_head_may_be_stored_too_but_must_be_the_same(write: Write) -> None:
    weights = random_weights(tie_word_embeddings=True)
    stored = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    assert load(write(stored, tie_word_embeddings=True)).weights.keys() == weights.keys()
    stored["lm_head.weight"][0, 0] += 1
    assert "lm_head.weight differs from" in refused(write(stored, tie_word_embeddings=True))


def test_equals_what_transformers_saves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in LLAMA.items() if key != "architectures"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_theta=5e5))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    checkpoint = load(tmp_path)
    state = model.state_dict()
    assert checkpoint.weights.keys() == state.keys()
    assert all(torch.equal(checkpoint.weights[name], tensor) for name, tensor in state.items())
    assert checkpoint.config.rope_theta == 5e5 and checkpoint.config.rms_norm_eps == model.config.rms_norm_eps


def test_bad_tensors_name_the_tensor_the_file_and_both_shapes(write: Write) -> None:
    weights = random_weights()
    name = "model.layers.1.self_attn.k_proj.weight"
    message = refused(write({**weights, name: torch.zeros(16, 16)}))
    assert all(part in message for part in (name, "model.safetensors", "[16, 16]", "[8, 16]"))
    message = refused(write({key: tensor for key, tensor in weights.items() if key != name}))
    assert name in message and "missing" in message
    assert "unexpected tensor model.layers.2.x [1]" in refused(write({**weights, "model.layers.2.x": torch.zeros(1)}))
    assert "dtype I8" in refused(write({**weights, name: torch.zeros(8, 16, dtype=torch.int8)}))
    assert "lm_head.weight" in refused(write(random_weights(tie_word_embeddings=True)))


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(write: Write, keep: int) -> None:
    file = write(random_weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or not a safetensors file" in refused(file.parent)


def test_missing_files(write: Write, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    path = write(shards(random_weights()))
    (path / "b.safetensors").rename(path / "pytorch_model.bin")
    assert f"{path / 'b.safetensors'} is missing" in refused(path)
    (path / "model.safetensors.index.json").unlink()
    assert "pickled weights only" in refused(path)
    (path / "pytorch_model.bin").unlink()
    assert "neither model.safetensors nor" in refused(path)
    (path / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused(path)
    (path / "config.json").unlink()
    assert "config.json is missing" in refused(path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "weight_map must map"),
        ({"weight_map": []}, "weight_map must map"),
        ({"weight_map": {"x": "../secret.safetensors"}}, "must be in a file of this directory"),
        ({"weight_map": {"x": 3}}, "must be in a file of this directory"),
        ({"weight_map": {"x": "a.safetensors"}}, "tensor x is missing"),
    ],
)
def test_bad_shard_index(write: Write, index: dict[str, Any], says: str) -> None:
    path = write(shards(random_weights()))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert says in refused(path)


def test_single_files_of_other_kinds(write: Write) -> None:
    path = write(random_weights())
    assert "give the directory" in refused(path / "model.safetensors")
    (path / "model.bin").write_bytes(b"\x80\x04")
    assert "may run code" in refused(path / "model.bin")
    assert "is not a GGUF file" in refused(path / "config.json")


def test_only_floating_dtypes_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"torch\.int8 is not supported; use one of: torch\.float32"):
        load(tmp_path, dtype=torch.int8)
