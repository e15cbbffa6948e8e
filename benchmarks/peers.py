"""What others compile a greedy decode step to, on our weights: plain torch as gpt-fast writes it, and transformers.

Both are modules whose `step()` reads and writes tensors that stay where they are (tokens, position, KV cache, weights),
so that `torch.compile(mode="reduce-overhead")` records it as a CUDA graph and copies nothing around it. Llama's family.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepgraph.engine.model import DecoderModel
from stepgraph.ops.layer import inverse_frequencies, rotary_tables
from stepgraph.ops.operations import LayerWeights

_WARM = 4  # calls: compiled, run once more to size the pool, recorded, replayed


class PeerMissing(Exception):
    """A peer that is not installed here, or in a version that it cannot be measured in."""


class GptFast(nn.Module):
    """Decodes a token a row as gpt-fast does: joined QKV, one position for all rows, a contiguous static cache.

    Attention is scaled_dot_product_attention by its mathematical form over the whole cache, which the compiler turns
    into kernels of its own. rows: of the batch. context: tokens that each attends to, the one it writes included.
    """

    inductor = {"coordinate_descent_tuning": True}  # gpt-fast's own setting: at one row projections become kernels
    tokens: torch.Tensor
    position: torch.Tensor

    def __init__(self, model: DecoderModel, rows: int, context: int) -> None:
        super().__init__()
        config, length, device = model.config, cache_length(context), model.device
        self.context, self.eps = context, config.rms_norm_eps
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
        cos, sin = rotary_tables(frequencies, length, model.dtype, device)
        keep(
            self,
            embedding=model.embedding,
            final_norm=model.final_norm,
            lm_head=model.lm_head,
            cos=cos,
            sin=sin,
            places=torch.arange(length, device=device),
            tokens=torch.ones(rows, dtype=torch.int64, device=device),
            position=torch.tensor([context - 1], device=device),
        )
        kv_shape = (rows, config.num_kv_heads, length, config.head_dim)
        self.layers = nn.ModuleList(GptFastLayer(layer, kv_shape, self.eps) for layer in model.layers)

    def step(self) -> torch.Tensor:
        """Chooses a token a row, feeds it back and moves on by one. Returns logits [rows, vocab]."""
        cos, sin = self.cos[self.position], self.sin[self.position]
        mask = (self.places <= self.position)[None, None, None]
        hidden = F.embedding(self.tokens, self.embedding)
        for layer in self.layers:
            hidden = layer(hidden, self.position, cos, sin, mask)
        logits = F.linear(normed(hidden, self.final_norm, self.eps), self.lm_head)
        self.tokens.copy_(logits.argmax(-1))
        self.position.add_(1)
        return logits

    def place(self, position: int) -> None:
        """The next step writes there."""
        self.position.fill_(position)

    def rewind(self) -> None:
        self.place(self.context - 1)


class GptFastLayer(nn.Module):
    """kv_shape: [rows, kv_heads, length, head_dim]; K and V start as noise."""

    def __init__(self, weights: LayerWeights, kv_shape: tuple[int, int, int, int], eps: float) -> None:
        super().__init__()
        self.eps, self.kv_heads, self.head_dim = eps, kv_shape[1], kv_shape[3]
        gate, up = weights.gate_up.chunk(2)
        keep(
            self,
            input_norm=weights.input_norm,
            qkv=weights.qkv,
            attention_out=weights.attention_out,
            post_norm=weights.post_norm,
            gate=gate,
            up=up,
            down=weights.down,
            keys=torch.randn(kv_shape, dtype=gate.dtype, device=gate.device),
            values=torch.randn(kv_shape, dtype=gate.dtype, device=gate.device),
        )

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """x: [rows, hidden]. position: [1]. cos, sin: [1, head_dim]. mask: bool [1, 1, 1, length]."""
        qkv = F.linear(normed(x, self.input_norm, self.eps), self.qkv)
        heads = qkv.view(x.shape[0], -1, 1, self.head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        self.keys[:, :, position] = rotated(k, cos, sin)
        self.values[:, :, position] = v
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(
                rotated(q, cos, sin), self.keys, self.values, attn_mask=mask, enable_gqa=True
            )
        x = x + F.linear(mixed.reshape(x.shape[0], -1), self.attention_out)
        y = normed(x, self.post_norm, self.eps)
        return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)


class Transformers(nn.Module):
    """transformers' own Llama with its static cache, the choice of the token within the compiled step.

    rows, context: as for GptFast.

    Raises:
        PeerMissing: transformers is missing, or not version 5.
    """

    inductor: dict[str, Any] = {}
    tokens: torch.Tensor

    def __init__(self, model: DecoderModel, rows: int, context: int) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            raise PeerMissing(f"transformers cannot be imported: {error}") from None
        if not hasattr(transformers.cache_utils.StaticLayer(1), "cumulative_length"):
            raise PeerMissing(f"transformers {transformers.__version__}: its static cache is not version 5's")
        config, device = model.config, model.device
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(_config(transformers, model), dtype=model.dtype)
        self.model.load_state_dict(_weights(model), assign=True)
        self.model.eval().requires_grad_(False)
        self.cache = transformers.StaticCache(self.model.config, max_cache_len=cache_length(context))
        self.cache.early_initialization(rows, config.num_kv_heads, config.head_dim, model.dtype, device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.lengths = [layer.cumulative_length for layer in self.cache.layers]
        takes = inspect.signature(type(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"  # newer and older transformers
        self.context = context
        keep(self, tokens=torch.ones(rows, dtype=torch.int64, device=device))
        self.rewind()

    def step(self) -> torch.Tensor:
        """As GptFast's."""
        logits = self.model(self.tokens[:, None], use_cache=True, **{self.cache_name: self.cache}).logits[:, -1]
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def place(self, position: int) -> None:
        torch._foreach_zero_(self.lengths)  # few launches, however many layers
        torch._foreach_add_(self.lengths, position)

    def rewind(self) -> None:
        self.place(self.context - 1)


PEERS: dict[str, Callable[[DecoderModel, int, int], Any]] = {"gpt-fast-like": GptFast, "transformers": Transformers}


class Compiled:
    """A peer's step compiled as a whole for its one size, and called until it is replayed.

    seconds: of compiling and recording. skips: recordings that the compiler gave up. graphs: replayed in one step.
    """

    def __init__(self, peer: Any) -> None:
        torch.compiler.reset()  # each size is compiled by itself, and the last one's graphs are let go
        torch._dynamo.utils.counters.clear()
        self.rewind = peer.rewind
        self.step = torch.compile(peer.step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        started = time.perf_counter()
        with torch._inductor.config.patch(peer.inductor):
            for _ in range(_WARM):
                peer.rewind()
                self.step()
        peer.rewind()
        self.graphs = replays(self.step)
        self.seconds = time.perf_counter() - started
        self.skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def replays(step: Callable[[], object]) -> int:
    """How many CUDA graphs a call of it replays."""
    replay = torch.cuda.CUDAGraph.replay
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=replay) as counted:
        step()
    return counted.call_count


def cache_length(context: int) -> int:
    """Of a static cache, in tokens: gpt-fast's, the next multiple of 8."""
    return -(-context // 8) * 8


def keep(module: nn.Module, **tensors: torch.Tensor) -> None:
    """As buffers, whose addresses the compiler takes as fixed."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [rows, heads, 1, head_dim]. The first half of `sin` is negated."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def _config(transformers: Any, model: DecoderModel) -> Any:
    config = model.config
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _weights(model: DecoderModel) -> dict[str, torch.Tensor]:
    """By transformers' names: views of ours, so that nothing is held twice."""
    config = model.config
    kv = config.num_kv_heads * config.head_dim
    found = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm,
        "lm_head.weight": model.lm_head,
    }
    for index, layer in enumerate(model.layers):
        q, k, v = layer.qkv.split([config.num_heads * config.head_dim, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out,
            "post_attention_layernorm": layer.post_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        found |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in parts.items()}
    return found
