"""What one rank has of a model: some heads, some of the inner size, some of the vocabulary.

Q, K, V, gate and up projections are cut by rows, output and down projections by columns, so that a layer needs two
sums over the ranks. The LM head is cut by tokens. Embedding and norms are whole on every rank, so that the embedding
needs no sum: for an 8B model 1 GB that is read one row a token.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.runtime.errors import ConfigError

_UNIT = 64  # of the inner size and the vocabulary: kernels like multiples
_NAME = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.(weight|bias)|(lm_head)\.weight")


@dataclass(frozen=True)
class Shard:
    """A rank's part of the model of this configuration.

    Query heads stay with their KV head. Where there are more ranks than KV heads, several ranks have the same one.
    Parts need not be equal: with 3 KV heads on 2 ranks, one has two of them.

    Raises:
        ConfigError: heads that cannot be dealt out to so many ranks.
    """

    config: ModelConfig
    rank: int
    world: int

    def __post_init__(self) -> None:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank} of {self.world}: ranks count from 0")
        if self.world > kv_heads and (self.world % kv_heads or heads % self.world):
            raise ConfigError(
                f"{self.world} ranks for {heads} heads and {kv_heads} KV heads: use at most {kv_heads}, or a number "
                f"that the KV heads divide and that divides the heads"
            )

    @property
    def kv_heads(self) -> range:
        kv_heads = self.config.num_kv_heads
        if self.world <= kv_heads:
            return _part(kv_heads, self.rank, self.world)
        mine = self.rank // (self.world // kv_heads)
        return range(mine, mine + 1)

    @property
    def heads(self) -> range:
        if self.world > self.config.num_kv_heads:
            return _part(self.config.num_heads, self.rank, self.world)
        group = self.config.num_heads // self.config.num_kv_heads
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

    @property
    def inner(self) -> range:
        """Rows of the gate and up projections, columns of the down projection."""
        return _part(self.config.intermediate_size, self.rank, self.world, _UNIT)

    @property
    def vocab(self) -> range:
        """Tokens whose logits this rank computes."""
        return _part(self.config.vocab_size, self.rank, self.world, _UNIT)

    @property
    def local(self) -> ModelConfig:
        """The configuration of this rank's part. The vocabulary stays whole: tokens are numbered alike everywhere."""
        return replace(
            self.config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )

    @property
    def alone(self) -> ModelConfig:
        """The same as a model of its own, whose projections have the sizes of this rank's: to measure them."""
        return replace(self.local, vocab_size=len(self.vocab))

    def cut(self, name: str, tensor: Any) -> Any:
        """This rank's part of the tensor of this name; the whole of one that every rank has.

        tensor: a torch tensor, or a slice of a file that reads what it is indexed with.
        """
        match = _NAME.fullmatch(name)
        kind = None if match is None else match[1] or match[3]
        if kind in ("q_proj", "k_proj", "v_proj"):
            part = self._of_heads(self.heads if kind == "q_proj" else self.kv_heads)
        elif kind in ("gate_proj", "up_proj"):
            part = self.inner
        elif kind == "lm_head":
            part = self.vocab
        elif kind == "o_proj":
            return _tensor(tensor[:, self._of_heads(self.heads).start : self._of_heads(self.heads).stop])
        elif kind == "down_proj":
            return _tensor(tensor[:, self.inner.start : self.inner.stop])
        else:
            return tensor if isinstance(tensor, torch.Tensor) else tensor[:]
        return _tensor(tensor[part.start : part.stop])

    def _of_heads(self, heads: range) -> range:
        size = self.config.head_dim
        return range(heads.start * size, heads.stop * size)


def _part(total: int, rank: int, world: int, unit: int = 1) -> range:
    """A rank's part: equal ones where the ranks divide the total, otherwise in units where there are enough of them."""
    unit = 1 if total % world == 0 else math.gcd(total, unit)
    if total // unit < world:
        unit = 1
    pieces = total // unit
    return range(pieces * rank // world * unit, pieces * (rank + 1) // world * unit)


def _tensor(part: torch.Tensor) -> torch.Tensor:
    """Contiguous, and without the rest of the tensor that it was cut from."""
    whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if whole and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
