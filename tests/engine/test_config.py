import json
from pathlib import Path
from typing import Any

import pytest

from stepgraph.engine.config import read_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.tensors import check_tensors, expected_tensors

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


MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 16}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 2}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        (MISTRAL, 16),
        ({**MISTRAL, "sliding_window": None}, None),
        ({**MISTRAL, "sliding_window": 64}, None),  # as long as the longest sequence
        ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, None),  # 4096 then
        ({**MISTRAL, "layer_types": [SLIDING] * 2}, 16),
        ({**LLAMA, "sliding_window": 16}, None),  # a Llama has no window, and transformers gives it none
        (QWEN2, None),
        ({**QWEN2, "use_sliding_window": True}, None),  # from layer 2 on, and there are 2
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64}, None),
        ({**QWEN3, "use_sliding_window": True, "layer_types": [SLIDING] * 2}, 16),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 0, "layer_types": [FULL] * 2}, None),
        ({**QWEN3, "use_sliding_window": False, "layer_types": [FULL] * 2}, None),
    ],
)
def test_sliding_windows(tmp_path: Path, fields: dict[str, Any], window: int | None) -> None:
    assert read_config(write(tmp_path, **fields)).window == window


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be an integer from 1"),
        ({**MISTRAL, "layer_types": [FULL, SLIDING]}, "only 1 of 2 layers have the sliding window of 16 tokens"),
        ({**MISTRAL, "layer_types": [FULL] * 2}, "only 0 of 2 layers"),
        ({**MISTRAL, "layer_types": [SLIDING]}, "layer_types must be 2 times"),
        ({**MISTRAL, "layer_types": "all"}, "layer_types must be 2 times"),
        ({**MISTRAL, "layer_types": [SLIDING, "chunked_attention"]}, "layer_types must be 2 times"),
        ({**MISTRAL, "sliding_window": None, "layer_types": [SLIDING] * 2}, "but no sliding_window is in use"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "only 1 of 2 layers"),
        ({**QWEN2, "use_sliding_window": "no"}, "use_sliding_window must be true or false"),
        ({**QWEN2, "max_window_layers": -1}, "max_window_layers must be an integer from 0"),
        ({**QWEN3, "layer_types": [SLIDING] * 2}, "but no sliding_window is in use"),
        ({**QWEN3, "attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_windows_and_biases_that_are_not_supported(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(write(tmp_path, **fields))
    assert says in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_families_have_their_own_defaults_and_tensors(tmp_path: Path) -> None:
    qwen2 = read_config(write(tmp_path, **QWEN2))
    assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.qk_norm) == (8, True, False)
    assert expected_tensors(qwen2)["model.layers.1.self_attn.k_proj.bias"] == (16,)
    qwen3 = read_config(write(tmp_path, **QWEN3))
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == (128, False, True)
    assert expected_tensors(qwen3)["model.layers.1.self_attn.q_norm.weight"] == (128,)
    sizes = {key: value for key, value in MISTRAL.items() if key not in ("max_position_embeddings", "head_dim")}
    assert read_config(write(tmp_path, **sizes)).max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; known: LlamaForCausalLM, Mistr",
        ),
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
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "'longrope' is not supported"),
        ({"rope_scaling": "default"}, "must be objects"),
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
