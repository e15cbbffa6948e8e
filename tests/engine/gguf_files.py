"""Writes small GGUF files of random weights, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "<s>", "</s>"]
SHAPES = {
    "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
    "attn_k.weight": ("self_attn.k_proj.weight", (HIDDEN // 2, HIDDEN)),
    "attn_v.weight": ("self_attn.v_proj.weight", (HIDDEN // 2, HIDDEN)),
    "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (INNER, HIDDEN)),
    "ffn_up.weight": ("mlp.up_proj.weight", (INNER, HIDDEN)),
    "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, INNER)),
}
MORE_SHAPES = {
    "llama": {},
    "qwen2": {
        "attn_q.bias": ("self_attn.q_proj.bias", (HIDDEN,)),
        "attn_k.bias": ("self_attn.k_proj.bias", (HIDDEN // 2,)),
        "attn_v.bias": ("self_attn.v_proj.bias", (HIDDEN // 2,)),
    },
    "qwen3": {
        "attn_q_norm.weight": ("self_attn.q_norm.weight", (HEAD_DIM,)),
        "attn_k_norm.weight": ("self_attn.k_norm.weight", (HEAD_DIM,)),
    },
}


def write_gguf(
    path: Path,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = True,
    *,
    architecture: str = "llama",
    heads: int = HEADS,
    metadata: Mapping[str, int | float | str] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Writes a file and returns what a reader should get: matrices rounded to the quantisation.

    metadata: more keys, after the architecture's prefix. extra: more tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {"rope.freq_base": 50000.0, **(metadata or {})}.items():
        adders[type(value)](f"{architecture}.{key}", value)  # type: ignore[operator]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    chance = np.random.default_rng(0)
    expected = {}
    permuted_heads = {"attn_q": HEADS, "attn_k": KV_HEADS} if architecture == "llama" else {}

    def add(name: str, hugging_face: str, shape: tuple[int, ...]) -> None:
        kind = quantised if len(shape) == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(chance.standard_normal(shape, dtype=np.float32), kind)
        expected[hugging_face] = gguf.quants.dequantize(data, kind)
        rows = permuted_heads.get(name.split(".")[-2])
        writer.add_tensor(name, _permuted(data, rows) if rows else data, raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    for layer in range(LAYERS):
        for name, (hugging_face, shape) in {**SHAPES, **MORE_SHAPES.get(architecture, {})}.items():
            add(f"blk.{layer}.{name}", f"model.layers.{layer}.{hugging_face}", shape)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order in which Llama's converter writes Q and K rows; a row is [values] or [quantised bytes]."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
