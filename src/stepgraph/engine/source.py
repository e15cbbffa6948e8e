"""What opening a model gives, before any of its tensors is read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.tokenizer import Tokenizer

Cut = Callable[[str, Any], torch.Tensor]
"""(name, a tensor or a slice of a file) -> the part of it that is wanted."""


@dataclass(frozen=True)
class Source:
    """An opened model. Every name and shape of its tensors has been checked.

    dtype: what the weights are stored as, or the nearest that the engine runs in.
    num_tensors: how many `tensors` yields, once, on the CPU.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    num_tensors: int
    tensors: Iterator[tuple[str, torch.Tensor]]
