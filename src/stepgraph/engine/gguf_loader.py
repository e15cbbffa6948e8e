"""Turns a GGUF file into weights under Hugging Face's names, beside its configuration and tokenizer."""

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

from stepgraph.engine.config import Family, ModelConfig
from stepgraph.engine.errors import ModelError
from stepgraph.engine.gguf_config import ROPE_FACTORS, read_gguf_config, stored_dtype
from stepgraph.engine.gguf_file import open_gguf
from stepgraph.engine.gguf_tokenizer import tokenizer_from_gguf
from stepgraph.engine.source import Source
from stepgraph.engine.tensors import check_tensors

# Tensor names: GGUF's stem -> Hugging Face's; "blk.7.attn_q" is "attn_q" of layer 7.
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROW_ELEMENTS = 16384  # gguf dequantises 16 rows at a time: 1 MiB of float32, few calls and still in the cache
_MOST_THREADS = 4


def load_gguf(path: Path, dtype: torch.dtype) -> Source:
    """Opens a GGUF file.

    Every name and shape is checked before the first tensor is dequantised. Tensors come in `dtype`, in memory of their
    own. Raises ModelError, naming the file and the tensor.
    """
    file = open_gguf(path)
    config, family = read_gguf_config(file)
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in file.tensors if tensor.name != ROPE_FACTORS}
    shapes = {name: (tuple(int(n) for n in reversed(tensor.shape)), str(path)) for name, tensor in tensors.items()}
    check_tensors(config, shapes, str(path))
    tokenizer = tokenizer_from_gguf(file.metadata, config.eos_token_ids, str(path))
    return Source(config, tokenizer, dtype, len(tensors), _dequantised(tensors, config, family, dtype, path))


def gguf_dtype(path: Path) -> torch.dtype:
    """What a GGUF file's weights are stored as; bfloat16 for quantised ones."""
    return stored_dtype(open_gguf(path))


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
