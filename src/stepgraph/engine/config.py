"""What a model is made of: its configuration, read defensively, and the tensors that follow from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.engine.errors import ModelError

_LARGEST_NUMBER = 1e30  # leaves out infinity and integers that no float holds
_MOST_LAYERS = 4096  # far above any model; a damaged count must not be looped over


@dataclass(frozen=True)
class Family:
    """One family of decoder models; a new family is a new row of FAMILIES."""

    name: str
    hf_class: str  # in config.json's "architectures"
    gguf_name: str  # GGUF's "general.architecture"
    gguf_permutes_rope: bool  # Q and K rows are stored in rotary pairs, not in halves


FAMILIES = (Family("llama", "LlamaForCausalLM", "llama", gguf_permutes_rope=True),)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. Lengths are in tokens, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when it is missing, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def one_line(error: BaseException) -> str:
    """The message of someone else's exception as one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_config(directory: Path) -> ModelConfig:
    """The configuration of a Hugging Face model directory: config.json, end tokens from generation_config.json.

    Raises ModelError for a missing file, a wrong type or range, or a model that the engine does not run.
    """
    path = directory / "config.json"
    fields = read_json(path)
    generation = directory / "generation_config.json"
    if generation.is_file():
        overrides = read_json(generation)
        for key in ("bos_token_id", "eos_token_id"):
            if overrides.get(key) is not None:
                fields[key] = overrides[key]
    classes = fields.get("architectures")
    hf_class = classes[0] if isinstance(classes, list) and classes else None
    family = next((family for family in FAMILIES if family.hf_class == hf_class), None)
    if family is None:
        known = ", ".join(family.hf_class for family in FAMILIES)
        raise ModelError(f"{path}: architecture {hf_class!r} is not supported; known: {known}")
    return parse_config(fields, family, str(path))


def parse_config(fields: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Checks a mapping with Hugging Face's key names and returns the configuration.

    Absent optional keys take the defaults of Hugging Face's LlamaConfig. Raises ModelError naming `where`,
    the key, its value and what is allowed.
    """
    _refuse_unsupported(fields, where)
    hidden_size = _integer(fields, "hidden_size", where)
    num_heads = _integer(fields, "num_attention_heads", where)
    num_kv_heads = _integer(fields, "num_key_value_heads", where, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = _integer(fields, "head_dim", where, default=hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even for rotary embeddings, got {head_dim}")
    vocab_size = _integer(fields, "vocab_size", where)
    tied = fields.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ModelError(f"{where}: tie_word_embeddings must be true or false, got {tied!r}")
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, "intermediate_size", where),
        num_layers=_integer(fields, "num_hidden_layers", where, high=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(fields, "rms_norm_eps", where, default=1e-6),
        rope_theta=_positive({"rope_theta": _either(fields, "rope_theta")}, "rope_theta", where, default=10000.0),
        max_position_embeddings=_integer(fields, "max_position_embeddings", where, default=2048),
        tie_word_embeddings=tied,
        bos_token_id=_first(_token_ids(fields, "bos_token_id", vocab_size, where)),
        eos_token_ids=_token_ids(fields, "eos_token_id", vocab_size, where),
    )


def _refuse_unsupported(fields: Mapping[str, Any], where: str) -> None:
    """A setting that would change the arithmetic and is not implemented must stop the load, not be ignored."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else repr(rope)
        if kind != "default":
            raise ModelError(f"{where}: {key} {kind!r} is not supported yet; use a model without rope scaling")
    rotated = _either(fields, "partial_rotary_factor")
    if rotated not in (None, 1):
        raise ModelError(f"{where}: partial_rotary_factor {rotated!r} is not supported yet")
    if fields.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantization_config is not supported; use an unquantised checkpoint or a GGUF file")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: hidden_act {fields['hidden_act']!r} is not supported; known: silu")
    for key in ("attention_bias", "mlp_bias"):
        if fields.get(key, False) is not False:
            raise ModelError(f"{where}: {key} {fields[key]!r} is not supported yet")


def _either(fields: Mapping[str, Any], key: str) -> Any:
    """A rotary setting, from the top level or, as newer files have it, from "rope_parameters"."""
    value = fields.get(key)
    return (fields.get("rope_parameters") or {}).get(key) if value is None else value


def _integer(fields: Mapping[str, Any], key: str, where: str, default: int | None = None, high: int = 2**31 - 1) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= high:
        got = "it is absent" if value is None else f"got {value!r}"
        raise ModelError(f"{where}: {key} must be an integer from 1 to {high}, {got}")
    return value


def _positive(fields: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = fields.get(key)
    if value is None:
        value = default
    if type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
        raise ModelError(f"{where}: {key} must be a number above 0 and at most {_LARGEST_NUMBER:g}, got {value!r}")
    return float(value)


def _token_ids(fields: Mapping[str, Any], key: str, vocab_size: int, where: str) -> tuple[int, ...]:
    value = fields.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ModelError(f"{where}: {key} must be a token id from 0 to {vocab_size - 1}, got {token!r}")
    return tuple(ids)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model needs, under Hugging Face's names, with its shape [out, in] or [size]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[tuple[int, ...], str]], where: str) -> None:
    """Compares what a checkpoint holds, name -> (shape, file), with what its configuration needs.

    `where` names the checkpoint as a whole, for a tensor that is in none of its files. Raises ModelError naming
    the first tensor that is missing, unexpected, or of another shape (both shapes).
    """
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} {list(shape)} is missing; the configuration needs it")
        actual, file = found[name]
        if actual != shape:
            raise ModelError(
                f"{file}: tensor {name} has shape {list(actual)}, but the configuration needs {list(shape)}"
            )
    for name, (shape, file) in found.items():
        if name not in expected:
            raise ModelError(f"{file}: unexpected tensor {name} {list(shape)}; the configuration has no place for it")
