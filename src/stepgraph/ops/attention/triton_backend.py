"""The Triton backend: simple kernels that a CUDA graph can hold."""

from collections.abc import Sequence

import torch

from stepgraph.ops.attention.contract import AttentionShape
from stepgraph.ops.attention.triton_decode import paged_decode
from stepgraph.ops.attention.triton_prefill import paged_prefill
from stepgraph.runtime.support import AttentionCGSupport


class TritonAttention:
    """Paged attention in two kernels. Both read lengths and tables on the device."""

    name = "triton"
    # A captured prefill is launched for one largest query length: right for uniform batches, wasteful for mixed ones.
    support = AttentionCGSupport.UNIFORM_BATCH
    device_types: tuple[str, ...] = ("cuda",)
    pad_seq_len = 0

    def __init__(self, shape: AttentionShape) -> None:
        self._scale = shape.scale

    def plan(self, seq_lens: Sequence[int], block_tables: torch.Tensor) -> None:
        """Nothing to do: lengths are read by the kernels."""

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        paged_decode(q, kv, block_tables, seq_lens, out, self._scale)

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        out: torch.Tensor,
        *,
        max_query_len: int,
    ) -> None:
        paged_prefill(q, kv, block_tables, seq_lens, query_start, out, self._scale, max_query_len)
