"""Turns a GGUF file into a configuration, a tokenizer and weights under Hugging Face's names."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, ReaderTensor
from gguf.quants import dequantize

from stepgraph.engine.config import FAMILIES, Family, ModelConfig, check_tensors, parse_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.gguf_file import GGUFFile, open_gguf
from stepgraph.engine.gguf_tokenizer import tokenizer_from_gguf
from stepgraph.engine.tokenizer import Tokenizer

# Configuration keys: Hugging Face's name -> GGUF's, after the architecture's prefix.
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}

# Tensor names: GGUF's stem -> Hugging Face's; "blk.7.attn_q" is "attn_q" of layer 7.
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROW_ELEMENTS = 16384  # gguf dequantises 16 rows at a time: 1 MiB of float32, few calls and still in the cache
_MOST_THREADS = 4


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, Tokenizer, int, Iterator[tuple[str, torch.Tensor]]]:
    """Opens a GGUF file: its configuration, tokenizer, number of tensors, and the tensors one by one.

    Every name and shape is checked before the first tensor is dequantised. Tensors come in `dtype` on the CPU, in
    memory of their own. Raises ModelError, naming the file and the tensor.
    """
    file = open_gguf(path)
    family = _family(file)
    config = _config(file, family)
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in file.tensors}
    shapes = {name: (tuple(int(n) for n in reversed(tensor.shape)), str(path)) for name, tensor in tensors.items()}
    check_tensors(config, shapes, str(path))
    tokenizer = tokenizer_from_gguf(file.metadata, config.eos_token_ids, str(path))
    return config, tokenizer, len(tensors), _dequantised(tensors, config, family, dtype, path)


def _family(file: GGUFFile) -> Family:
    architecture = file.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf_name == architecture:
            return family
    known = ", ".join(family.gguf_name for family in FAMILIES)
    raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; known: {known}")


def _config(file: GGUFFile, family: Family) -> ModelConfig:
    prefix = f"{family.gguf_name}."
    metadata, where = file.metadata, str(file.path)
    fields: dict[str, Any] = {name: metadata.get(prefix + key) for name, key in _CONFIG_KEYS.items()}
    if fields["vocab_size"] is None:
        fields["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens") or ())
    names = {tensor.name for tensor in file.tensors}
    fields["tie_word_embeddings"] = "output.weight" not in names
    fields["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    fields["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    scaling = metadata.get(prefix + "rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in names:
        raise ModelError(f"{where}: rope scaling ({scaling or 'rope_freqs.weight'}) is not supported yet")
    if metadata.get(prefix + "expert_count"):
        raise ModelError(f"{where}: a mixture of experts is not supported; use a dense model")
    return parse_config(fields, family, where)


def _hugging_face_name(name: str) -> str:
    """A name that is not in the tables is returned as it is; the comparison of names then calls it unexpected."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    return name


def _dequantised(
    tensors: dict[str, ReaderTensor], config: ModelConfig, family: Family, dtype: torch.dtype, path: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Works a few tensors ahead on a few threads: NumPy computes without the interpreter's lock."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if family.gguf_permutes_rope else {}

    def work(name: str, tensor: ReaderTensor) -> torch.Tensor:
        weights = _dequantise(name, tensor, path)
        permuted = heads.get(name.split(".")[-2])
        if permuted:
            weights = _halves_from_pairs(weights, permuted)
        if np.may_share_memory(weights, tensor.data):  # float32 in the file: a view of it, and read-only
            weights = weights.copy()
        return torch.from_numpy(weights).to(dtype)

    workers = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
        for name, tensor in tensors.items():
            ahead.append((name, pool.submit(work, name, tensor)))
            if len(ahead) > 2 * workers:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()


def _dequantise(name: str, tensor: ReaderTensor, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 values in the tensor's shape [out, in] or [size].

    Blocks do not know about rows, so several short rows are handed over as one long row: the package loops over
    groups of 16 rows, and small matrices cost mostly that loop.
    """
    shape = tuple(int(n) for n in reversed(tensor.shape))
    data = tensor.data
    if tensor.tensor_type in GGML_QUANT_SIZES and data.dtype == np.uint8 and data.ndim == 2:
        joined = max(1, min(shape[0], _ROW_ELEMENTS // shape[1]))
        while shape[0] % joined:
            joined -= 1
        data = data.reshape(shape[0] // joined, -1)
    try:
        values = dequantize(data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise ModelError(f"{path}: tensor {name} has quantisation {kind}, which is not supported") from None
    return values.reshape(shape)


def _halves_from_pairs(
    weights: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Undoes GGUF's order of Q and K rows: rotary partners are neighbours there, and half a head apart here."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
