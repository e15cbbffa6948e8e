"""Reads a model's configuration from a GGUF file's metadata."""

from dataclasses import replace
from typing import Any

import torch
from gguf import GGMLQuantizationType

from stepgraph.engine.config import FAMILIES, Family, ModelConfig, parse_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.gguf_file import GGUFFile
from stepgraph.ops.layer import inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is a setting: what each rotary frequency is divided by. Converters write it for Llama 3.1."""

# Hugging Face's name -> GGUF's, after the architecture's prefix.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_ROPE_KEYS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys that change the arithmetic, with the one value that does not.
_REFUSED_KEYS = {
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "rope.scale_linear": 1,
    "attention.sliding_window": 0,
    "expert_count": 0,
}
_DTYPES = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}


def read_gguf_config(file: GGUFFile) -> tuple[ModelConfig, Family]:
    """The configuration, and the family it belongs to. Raises ModelError for what the engine does not run."""
    architecture = file.metadata.get("general.architecture")
    family = next((family for family in FAMILIES if family.gguf_name == architecture), None)
    if family is None or family.gguf_name is None:
        known = ", ".join(family.gguf_name for family in FAMILIES if family.gguf_name)
        raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; known: {known}")
    prefix, metadata, where = f"{family.gguf_name}.", file.metadata, str(file.path)
    for key, harmless in _REFUSED_KEYS.items():
        value = metadata.get(prefix + key, harmless)
        if value != harmless:
            raise ModelError(f"{where}: {prefix}{key} {value!r:.80} is not supported; only {harmless} is")
    fields: dict[str, Any] = {name: metadata.get(prefix + key) for name, key in _KEYS.items()}
    if fields["vocab_size"] is None:
        fields["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens") or ())
    fields["head_dim"] = _head_dim(metadata, prefix, where)
    fields["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in file.tensors)
    fields["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    fields["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    rope = {name: metadata.get(prefix + key) for name, key in _ROPE_KEYS.items()}
    if rope["rope_type"] not in (None, "none"):
        fields["rope_parameters"] = rope
    return _divided(parse_config(fields, family, where), file), family


def stored_dtype(file: GGUFFile) -> torch.dtype:
    """What the embedding is stored as; bfloat16 where that is quantised."""
    kinds = (tensor.tensor_type for tensor in file.tensors if tensor.name == "token_embd.weight")
    return _DTYPES.get(next(kinds, GGMLQuantizationType.BF16), torch.bfloat16)


def _head_dim(metadata: dict[str, Any], prefix: str, where: str) -> int | None:
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    found = {key: metadata[prefix + key] for key in keys if prefix + key in metadata}
    sizes = list(found.values())
    if any(size != sizes[0] for size in sizes):
        raise ModelError(f"{where}: {found} differ; only heads of one size that are rotated as a whole are supported")
    return sizes[0] if sizes else None


def _divided(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """The configuration with its rotary frequencies divided by the factors that the file has as a tensor."""
    tensor = next((tensor for tensor in file.tensors if tensor.name == ROPE_FACTORS), None)
    if tensor is None:
        return config
    if config.rope_frequencies is not None:
        raise ModelError(f"{file.path}: both {ROPE_FACTORS} and rope scaling in the metadata; one is supported")
    factors, pairs = tensor.data, config.head_dim // 2
    if tensor.tensor_type != GGMLQuantizationType.F32 or factors.shape != (pairs,) or not (factors > 0).all():
        raise ModelError(f"{file.path}: {ROPE_FACTORS} must be {pairs} float32 numbers above 0")
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta) / torch.from_numpy(factors.copy())
    return replace(config, rope_frequencies=tuple(frequencies.tolist()))
