"""What a model is made of: its family, and its configuration, read defensively."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import flag, integer, positive, read_json, token_ids
from stepgraph.engine.rope import read_rope
from stepgraph.runtime.errors import ConfigError

_FULL, _SLIDING = "full_attention", "sliding_attention"  # Hugging Face's "layer_types"
_MOST_LAYERS = 4096  # far above any model; a damaged count must not be looped over


@dataclass(frozen=True)
class Family:
    """One family of decoder models; a new family is a new row of FAMILIES.

    hf_class: the name in config.json's "architectures". gguf_name: GGUF's "general.architecture"; None: it has none.
    defaults: what Hugging Face's configuration class takes for an absent key, where that is not the same for all.
    window: whose attention has a sliding window: no layer's; all layers' where "sliding_window" is given; or the
        layers that "use_sliding_window", "max_window_layers" and "layer_types" choose.
    qkv_bias: Q, K and V projections have biases. qk_norm: query and key heads are normed before they are rotated.
    gguf_permutes_rope: GGUF stores Q and K rows in rotary pairs, not in halves.
    """

    name: str
    hf_class: str
    gguf_name: str | None
    defaults: Mapping[str, Any]
    window: Literal["none", "all", "chosen"] = "none"
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_rope: bool = False


# SmolLM2 is a Llama. A GGUF file calls Mistral's models llama too.
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama", {"max_position_embeddings": 2048}, gguf_permutes_rope=True),
    Family("mistral", "MistralForCausalLM", None, _MISTRAL, window="all"),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", _QWEN, window="chosen", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", {**_QWEN, "head_dim": 128}, window="chosen", qk_norm=True),
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. Lengths are in tokens, sizes in elements.

    max_position_embeddings: the longest sequence, rope scaling included.
    rope_frequencies: radians a position, one for each pair of a head's elements; None: theta's own, unscaled.
    rope_scale: multiplies the rotary cosines and sines.
    window: a token attends to this many tokens, itself included; None: to all before it.
    """

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
    rope_frequencies: tuple[float, ...] | None = None
    rope_scale: float = 1.0
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


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
    return parse_config({**family.defaults, **fields}, family, str(path))


def parse_config(fields: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Checks a mapping with Hugging Face's key names and returns the configuration.

    Raises ModelError naming `where`, the key, its value and what is allowed.
    """
    _refuse_unsupported(fields, where)
    hidden_size = integer(fields, "hidden_size", where)
    num_heads = integer(fields, "num_attention_heads", where)
    num_kv_heads = integer(fields, "num_key_value_heads", where, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = integer(fields, "head_dim", where, default=hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even for rotary embeddings, got {head_dim}")
    vocab_size = integer(fields, "vocab_size", where)
    num_layers = integer(fields, "num_hidden_layers", where, high=_MOST_LAYERS)
    rope = read_rope(fields, head_dim, integer(fields, "max_position_embeddings", where, default=2048), where)
    bos = token_ids(fields, "bos_token_id", vocab_size, where)
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=integer(fields, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive(fields, "rms_norm_eps", where, default=1e-6),
        rope_theta=rope.theta,
        max_position_embeddings=rope.max_positions,
        tie_word_embeddings=flag(fields, "tie_word_embeddings", where),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(fields, "eos_token_id", vocab_size, where),
        rope_frequencies=rope.frequencies,
        rope_scale=rope.scale,
        window=_window(fields, family, num_layers, rope.max_positions, where),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _refuse_unsupported(fields: Mapping[str, Any], where: str) -> None:
    """A setting that would change the arithmetic and is not implemented must stop the load, not be ignored."""
    if fields.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantization_config is not supported; use an unquantised checkpoint or a GGUF file")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: hidden_act {fields['hidden_act']!r} is not supported; known: silu")
    for key in ("attention_bias", "mlp_bias"):
        if fields.get(key, False) is not False:
            raise ModelError(f"{where}: {key} {fields[key]!r} is not supported; use a model without these biases")


def _window(fields: Mapping[str, Any], family: Family, num_layers: int, max_positions: int, where: str) -> int | None:
    """The sliding window that all layers share; None where none has one that is shorter than the longest sequence."""
    if family.window == "none":
        return None
    size = None if fields.get("sliding_window") is None else integer(fields, "sliding_window", where)
    first = 0
    if family.window == "chosen":
        first = integer(fields, "max_window_layers", where, default=0, low=0)
        if not flag(fields, "use_sliding_window", where):
            size = None
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [_FULL if size is None or layer < first else _SLIDING for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise ModelError(f"{where}: layer_types must be {num_layers} times {_FULL} or {_SLIDING}, got {kinds!r:.80}")
    if size is None and _SLIDING in kinds:
        raise ModelError(f"{where}: layer_types names {_SLIDING}, but no sliding_window is in use")
    if size is None or size >= max_positions:
        return None
    if _FULL not in kinds:
        return size
    if _SLIDING in kinds or family.window == "all":
        raise ModelError(
            f"{where}: only {kinds.count(_SLIDING)} of {num_layers} layers have the sliding window of {size} tokens; "
            "a window is supported in all layers or in none"
        )
    return None


def model_len(config: ModelConfig, asked: int | None) -> int:
    """The longest sequence in tokens; by default the model's own limit.

    Raises:
        ConfigError: a length that the model does not allow.
    """
    if asked is None:
        return config.max_position_embeddings
    if not 2 <= asked <= config.max_position_embeddings:
        raise ConfigError(f"max_model_len is {asked}; this model allows 2 to {config.max_position_embeddings}")
    return asked
