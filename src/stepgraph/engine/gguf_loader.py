"""Reads a GGUF file: configuration and tokenizer from its metadata, weights dequantised to float32."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from stepgraph.engine.config import FAMILIES, Family, ModelConfig, check_tensors, one_line, parse_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.gguf_tokenizer import tokenizer_from_gguf
from stepgraph.engine.tokenizer import Tokenizer

# Configuration keys: Hugging Face's name -> GGUF's, after the architecture's prefix.
_CONFIG_KEYS = {
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

# Tensor names: GGUF's stem -> Hugging Face's; "blk.7.attn_q" is layer 7's "attn_q".
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
_GROUP_ELEMENTS = 65536  # of one long row: 16 of them, which gguf does at once, are 4 MiB of float32
