"""The decoder: weights laid out for an operation set, and the forward pass over a paged cache."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.kv_blocks import BLOCK_SIZE
from stepgraph.ops.attention import AttentionShape
from stepgraph.ops.layer import inverse_frequencies, rotary_tables
from stepgraph.ops.lora import NO_ADAPTERS, LayerAdapters
from stepgraph.ops.operations import Attend, DecoderShape, Hidden, LayerWeights, Reduce, get_operations
from stepgraph.runtime.platforms import Platform, platform_for
from stepgraph.runtime.regions import region


def attention_shape(config: ModelConfig) -> AttentionShape:
    """What the model asks of its attention."""
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE, window=config.window)


class DecoderModel:
    """A Llama-shaped decoder. Knows nothing of requests: rows in, hidden states out, the cache written.

    weights: Hugging Face names; emptied, so that no projection that is joined with others is held twice.
    max_positions: rotary tables cover positions below it.
    operations: the operation set that computes it; None: the preferred one on the weights' device.
    reduce, vocab: of a rank among several: what sums over them, and the tokens of its part of the LM head. The
        configuration and the weights are then the rank's own (see `parallel/shard.py`), but for the embedding.

    Raises:
        ConfigError: an operation set that does not run on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MutableMapping[str, torch.Tensor],
        max_positions: int,
        operations: str | None = None,
        *,
        reduce: Reduce | None = None,
        vocab: range | None = None,
    ) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.final_norm = weights.pop("model.norm.weight")
        if not config.tie_word_embeddings:
            self.lm_head = weights.pop("lm_head.weight")
        else:
            self.lm_head = self.embedding if vocab is None else self.embedding[vocab.start : vocab.stop]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.layers = _layers(config, weights, platform_for(self.device))
        if config.rope_frequencies is None:
            frequencies = inverse_frequencies(config.head_dim, config.rope_theta)
        else:
            frequencies = torch.tensor(config.rope_frequencies)
        cos, sin = rotary_tables(frequencies, max_positions, self.dtype, self.device, config.rope_scale)
        shape = DecoderShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, cos=cos, sin=sin, reduce=reduce
        )
        self.operations = get_operations(operations, self.device, shape)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        kv_cache: torch.Tensor,
        attend: Attend,
        adapters: Sequence[LayerAdapters] | None = None,
    ) -> Hidden:
        """tokens, positions: int64 [rows]. block_tables: int32 [rows, max_blocks], one row per token here.

        kv_cache: [blocks, layers, 2, block_size, kv_heads, head_dim]. adapters: of each layer; None: no row has one.
        Returns the rows behind the last layer.
        """
        operations = self.operations
        places = operations.places(positions, block_tables, kv_cache.shape[3])
        hidden = operations.embed(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            with region(f"layers.{index}"):
                mine = NO_ADAPTERS if adapters is None else adapters[index]
                hidden = operations.layer(hidden, layer, places, kv_cache[:, index], attend, mine)
        return hidden

    def logits(self, hidden: Hidden) -> torch.Tensor:
        """hidden: rows from `forward`. Returns [rows, vocab], of a rank its part, in the model's dtype."""
        return self.operations.head(hidden, self.final_norm, self.lm_head)

    def describe(self, rows: int) -> dict[str, str]:
        """What computes each projection of a batch of so many rows; see `OperationSet.describe`."""
        return self.operations.describe(self.layers[0], self.lm_head, rows)


def _layers(config: ModelConfig, weights: MutableMapping[str, torch.Tensor], platform: Platform) -> list[LayerWeights]:
    """The parts of each layer's joined matrices are returned to the device before the next layer's are made: these
    would be cut out of what the parts took, and the rest of it be lost (270 MiB of an 8B model)."""
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, weights, f"model.layers.{index}."))
        platform.give_back()
    return layers


def _layer(config: ModelConfig, weights: MutableMapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    def take(*names: str, kind: str = "weight") -> torch.Tensor:
        parts = [weights.pop(f"{prefix}{name}.{kind}") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return LayerWeights(
        input_norm=take("input_layernorm"),
        qkv=take(*qkv),
        attention_out=take("self_attn.o_proj"),
        post_norm=take("post_attention_layernorm"),
        gate_up=take("mlp.gate_proj", "mlp.up_proj"),
        down=take("mlp.down_proj"),
        qkv_bias=take(*qkv, kind="bias") if config.qkv_bias else None,
        q_norm=take("self_attn.q_norm") if config.qk_norm else None,
        k_norm=take("self_attn.k_norm") if config.qk_norm else None,
    )
