"""The tensors that follow from a configuration, and whether a checkpoint has them."""

from collections.abc import Mapping

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.errors import ModelError


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
        if config.qkv_bias:
            shapes |= {
                prefix + "self_attn.q_proj.bias": (queries,),
                prefix + "self_attn.k_proj.bias": (keys,),
                prefix + "self_attn.v_proj.bias": (keys,),
            }
        if config.qk_norm:
            shapes |= {
                prefix + "self_attn.q_norm.weight": (config.head_dim,),
                prefix + "self_attn.k_norm.weight": (config.head_dim,),
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
