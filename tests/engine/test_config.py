import json
from pathlib import Path
from typing import Any

import pytest

from stepgraph.engine.config import check_tensors, expected_tensors, read_config
from stepgraph.engine.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(directory: Path, name: str = "config.json", **fields: Any) -> Path:
    (directory / name).write_text(json.dumps(fields))
    return directory


def test_reads_a_llama_config(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, **LLAMA))
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("llama", 8, 2)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)


def test_absent_optional_keys_take_hugging_faces_defaults(tmp_path: Path) -> None:
    required = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = read_config(write(tmp_path, num_attention_heads=4, **{key: LLAMA[key] for key in required}))
    assert (config.num_kv_heads, config.rope_theta, config.rms_norm_eps) == (4, 10000.0, 1e-6)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (2048, False)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, **LLAMA)
    write(tmp_path, "generation_config.json", eos_token_id=[2, 7, 9], bos_token_id=None)
    config = read_config(tmp_path)
    assert config.eos_token_ids == (2, 7, 9) and config.bos_token_id == 1


def test_rope_theta_may_stand_in_rope_parameters(tmp_path: Path) -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read_config(write(tmp_path, **fields, rope_parameters=rope, rope_scaling=None)).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; known: LlamaForCausalLM"),
        ({"architectures": None}, "known: LlamaForCausalLM"),
        ({"architectures": [["x"]]}, "known: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size must be an integer from 1"),
        ({"hidden_size": "32"}, "got '32'"),
        ({"hidden_size": True}, "got True"),
        ({"hidden_size": 0}, "got 0"),
        ({"hidden_size": 33}, "not a multiple of num_attention_heads 4"),
        ({"vocab_size": 2**31}, "vocab_size must be"),
        ({"num_hidden_layers": 10**9}, "from 1 to 4096"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "got nan"),
        ({"rope_theta": float("inf")}, "got inf"),
        ({"rope_theta": 10**400}, "rope_theta must be"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' is not supported yet"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported yet"),
        ({"rope_scaling": "default"}, "not supported yet"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported yet"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"eos_token_id": 96}, "eos_token_id must be a token id from 0 to 95, got 96"),
        ({"eos_token_id": [2, -1]}, "got -1"),
        ({"bos_token_id": 1.0}, "got 1.0"),
    ],
)
def test_what_is_wrong_or_unsupported_is_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(write(tmp_path, **{**LLAMA, **change}))
    message = str(caught.value)
    assert says in message and str(tmp_path / "config.json") in message and "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is missing"),
        ("{", "cannot be read as JSON"),
        ("[]", "an object is needed"),
        ("\udcff", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=says):
        read_config(tmp_path)


def test_expected_tensors_follow_the_sizes(tmp_path: Path) -> None:
    tied = expected_tensors(read_config(write(tmp_path, **LLAMA)))
    assert len(tied) == 2 + 2 * 9 and "lm_head.weight" not in tied
    assert tied["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert tied["model.layers.0.mlp.down_proj.weight"] == (32, 48)
    untied = expected_tensors(read_config(write(tmp_path, **{**LLAMA, "tie_word_embeddings": False})))
    assert untied["lm_head.weight"] == (96, 32)


def test_check_tensors_names_tensor_file_and_both_shapes(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, **LLAMA))
    found = {name: (shape, "a.safetensors") for name, shape in expected_tensors(config).items()}
    check_tensors(config, found, "model")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError) as caught:
        check_tensors(config, {**found, name: ((48, 31), "b.safetensors")}, "model")
    assert all(part in str(caught.value) for part in (name, "b.safetensors", "[48, 31]", "[48, 32]"))
    with pytest.raises(ModelError, match="model: tensor model.norm.weight .* is missing"):
        check_tensors(config, {key: value for key, value in found.items() if key != "model.norm.weight"}, "model")
    with pytest.raises(ModelError, match=r"b\.st: unexpected tensor model\.extra \[3\]"):
        check_tensors(config, {**found, "model.extra": ((3,), "b.st")}, "model")
