"""Operation sets: what computes a decoder layer around its attention, and which one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from stepgraph.ops.lora import NO_ADAPTERS, LayerAdapters, LayerLora, LoraRows
from stepgraph.runtime.errors import ConfigError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(q [rows, heads, head_dim], one layer of the cache, out like q): writes the attention output into `out`."""

Reduce = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, residual): the sum of x over the ranks of a tensor-parallel group, plus residual. x is consumed: the result may
lie in its memory or in a new tensor."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices [out, in] and vectors; projections that read the same input joined into one.

    qkv: Q, K, V in this order; qkv_bias the same. q_norm, k_norm: RMSNorm weights [head_dim] of each head, applied
        before the rotary embedding. None where a family has none.
    gate_up: gate first.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderShape:
    """What all layers share.

    num_heads, num_kv_heads: of this rank, where several compute a model.
    cos, sin: [positions, head_dim] in the model's dtype, from `rotary_tables`: the first half of `sin` is negated.
    reduce: of such ranks: what sums the output and down projections, of which each rank has a part; None: one rank.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    reduce: Reduce | None = None


@dataclass(frozen=True)
class Hidden:
    """The rows between two layers: `new` + `residual`, both [rows, hidden].

    residual: None where nothing is left to add. A layer may overwrite both.
    """

    new: torch.Tensor
    residual: torch.Tensor | None = None

    def __getitem__(self, rows: torch.Tensor | slice) -> Hidden:
        """Some of the rows."""
        return Hidden(self.new[rows], None if self.residual is None else self.residual[rows])


@dataclass(frozen=True)
class Places:
    """Kernels read positions and block tables where they lie, so that a step launches nothing for them."""

    positions: torch.Tensor
    block_tables: torch.Tensor


class OperationSet(Protocol):
    """The pieces of a forward pass. Attention has backends of its own and is called through `attend`.

    All of it can be captured on the devices the set runs on. Each piece names its launches with regions.
    """

    @property
    def name(self) -> str:
        """The name `get_operations` and the command line know it by."""

    def places(self, positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> Any:
        """Where this step's rows stand, made once a step and handed to every layer; its type is the set's own.

        positions: int64 [rows]. block_tables: int32 [rows, max_blocks]. Padded rows: position 0, block 0.
        """

    def embed(self, tokens: torch.Tensor, embedding: torch.Tensor) -> Hidden:
        """tokens: int64 [rows]. embedding: [vocab, hidden]."""

    def adapters(self, rows: LoraRows, layers: Sequence[LayerLora]) -> list[LayerAdapters]:
        """What adds the adapters of this step's rows to each layer's projections; made once a step."""

    def layer(
        self,
        hidden: Hidden,
        weights: LayerWeights,
        places: Any,
        kv: torch.Tensor,
        attend: Attend,
        adapters: LayerAdapters = NO_ADAPTERS,
    ) -> Hidden:
        """One layer. kv: its cache, [blocks, 2, block_size, kv_heads, head_dim], where the rows' K and V are written.

        Only the first dimension of `kv` may be strided. adapters: of the rows of this step.
        """

    def head(self, hidden: Hidden, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The norm after the last layer and the LM head. norm: [hidden]. weight: [vocab, hidden].

        Returns logits [rows, vocab] in the model's dtype.
        """

    def describe(self, weights: LayerWeights, lm_head: torch.Tensor, rows: int) -> dict[str, str]:
        """What computes each projection of a batch of so many rows, and why; empty where it is the same for all."""


_DEVICE_TYPES = {"fused": ("cuda",), "unfused": ("cuda",), "reference": ("cuda", "cpu")}  # the preferred one first
OPERATION_SETS = tuple(_DEVICE_TYPES)
"""All names that there are."""
_TRITON = ("fused", "unfused")  # the sets whose kernels are written in it


def choose_operations(name: str | None, device: torch.device | str, *, compiled: bool = False) -> str:
    """The set that runs on a device: `name`, or the preferred one for None.

    compiled: whether torch's compiler is to see what it does; it sees no kernels that are launched past torch.

    Raises:
        ConfigError: an unknown name, a set that does not run there, or one whose packages are missing.
    """
    kind = torch.device(device).type
    here = [known for known, kinds in _DEVICE_TYPES.items() if kind in kinds]
    if compiled and name in _TRITON:
        raise ConfigError(f"operations: torch's compiler does not see the kernels of '{name}'; use reference")
    if compiled or find_spec("triton") is None:
        here = [known for known in here if known not in _TRITON]
    usable = f"available on {kind}: {', '.join(here) or 'none'}"
    if name is None:
        if not here:
            raise ConfigError(f"operations: no set runs on device '{kind}'; use cpu or cuda")
        return here[0]
    if name not in _DEVICE_TYPES:
        raise ConfigError(f"operations: unknown set '{name}'; {usable}")
    if kind not in _DEVICE_TYPES[name]:
        raise ConfigError(f"operations: '{name}' runs on {', '.join(_DEVICE_TYPES[name])}, not on {kind}; {usable}")
    if name not in here:
        raise ConfigError(f"operations: '{name}' needs the triton package, which is not installed; {usable}")
    return name


def get_operations(name: str | None, device: torch.device | str, shape: DecoderShape) -> OperationSet:
    """Make the set `name` (None: the preferred one) for a device. Raises ConfigError where it cannot run."""
    chosen = choose_operations(name, device)
    if chosen == "reference":
        from stepgraph.ops.reference_set import ReferenceOperations

        return ReferenceOperations(shape)
    # These import triton, which a CPU machine may lack.
    if chosen == "fused":
        from stepgraph.ops.fused.operation_set import FusedOperations

        return FusedOperations(shape)
    from stepgraph.ops.unfused import UnfusedOperations

    return UnfusedOperations(shape)
