"""The one contract between a model and its attention: plan outside the graph, run inside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.support import AttentionCGSupport


@dataclass(frozen=True)
class AttentionShape:
    """Head counts and sizes of one attention group. Raises ConfigError where they do not fit together.

    window: a token sees this many tokens, itself included; None: all up to its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.block_size) < 1:
            raise ConfigError(f"attention: every size must be at least 1, got {self}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"attention: a window must hold at least 1 token, got {self.window}; None is no window")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "num_heads must be a multiple of num_kv_heads"
            )

    @property
    def scale(self) -> float:
        """The softmax scale, head_dim ** -0.5."""
        return self.head_dim**-0.5


class LiveTensors(Mapping[str, torch.Tensor]):
    """Tensors at attribute paths of an object, such as `workspace.parts`. See `AttentionBackend.tensors`."""

    def __init__(self, owner: object, *paths: str) -> None:
        self._owner = owner
        self._getters = {path: attrgetter(path) for path in paths}

    def __getitem__(self, path: str) -> torch.Tensor:
        tensor: torch.Tensor = self._getters[path](self._owner)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._getters)

    def __len__(self) -> int:
        return len(self._getters)


class AttentionBackend(Protocol):
    """Paged attention over one layer's view of the KV cache.

    `kv` is [num_blocks, 2, block_size, num_kv_heads, head_dim] (2: K, then V); only its first dimension may be strided.
    Token t of row r lies in block `block_tables[r, t // block_size]` at slot `t % block_size`. `block_tables` is
    int32 [rows, max_blocks], `seq_lens` int32 [rows] counts the tokens of a row, the new ones included.
    What lies beyond a row's length is never used: NaN there, or anywhere in block 0, changes no result.
    """

    @property
    def name(self) -> str:
        """The name `get_backend` and the command line know it by."""

    @property
    def support(self) -> AttentionCGSupport:
        """What may be captured on the device that the backend was made for."""

    @property
    def max_query_len(self) -> int | None:
        """The most new tokens of a request that a recording of it replays right; None: any number. A configuration
        that needs more takes a lesser mode."""

    @property
    def device_types(self) -> tuple[str, ...]:
        """The torch device types it runs on."""

    @property
    def pad_seq_len(self) -> int:
        """The length to give padded rows."""

    @property
    def plans_each_step(self) -> bool:
        """Whether `plan` prepares what a step reads. Several steps cannot share a launch then."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What its kernels use besides their arguments (a workspace), by name; looked up anew at each access, so that
        it shows where a tensor was replaced. A graph holds their addresses: a runner watches them."""

    def plan(self, seq_lens: Sequence[int] | np.ndarray[Any, Any], block_tables: torch.Tensor) -> None:
        """Prepare one decode step, on the host and outside the graph; may do nothing.

        `seq_lens` holds one length per real row, as far as the host knows: a row that has ended on the device has
        length 0 there. Padded rows have `pad_seq_len`; `block_tables` is the buffer that the graph reads, [rows,
        max_blocks].
        """

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend with one new token per row. `q` and `out` are [rows, num_heads, head_dim].

        Runs inside the graph: lengths and tables are read when it is replayed. A row of length 0 gives exactly 0.
        """

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend with any number of new tokens per request, causally. `q` and `out` are [tokens, num_heads, head_dim].

        Request r owns tokens `query_start[r]` to `query_start[r + 1]` (int32 [requests + 1], starting at 0, never
        falling); its token j sits at position `seq_len - query_len + j` and sees the positions up to its own.
        A request without new tokens is an unused slot, wherever it stands: its length and table mean nothing, but
        where no request has any, all lengths are 0. Tokens past `query_start[-1]` are padding: NaN there changes no
        result, and their `out` is left as it is or set to 0.

        With support ALWAYS, a capture fixes the numbers of tokens and requests only.
        """
