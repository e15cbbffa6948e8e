"""The Triton backend: kernels that a CUDA graph can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stepgraph.ops.attention.contract import AttentionShape, LiveTensors
from stepgraph.ops.attention.decode_plan import TRITON, DecodeConfig, SplitPlan
from stepgraph.ops.attention.triton_decode import DecodeWorkspace, paged_decode
from stepgraph.ops.attention.triton_prefill import paged_prefill
from stepgraph.ops.overlap import can_overlap
from stepgraph.runtime.errors import InputError
from stepgraph.runtime.support import AttentionCGSupport


class TritonAttention:
    """Paged attention in two kernels. Both read lengths and tables on the device.

    Its workspace is allocated here, and serves all layers and all captured sizes: their kernels run one after another.

    max_rows: rows of the largest decode. max_len: tokens of the longest row.
    config: how decode is built and cut; by default what was fastest on an H200 (benchmarks/h200_attention.py), without
        programmatic dependent launch where the device has none. num_sms: by default the device's own.
    """

    name = "triton"
    # Prefill too is launched by the numbers of tokens and requests alone: how they are shared is read on the device.
    support = AttentionCGSupport.ALWAYS
    max_query_len: int | None = None
    device_types: tuple[str, ...] = ("cuda",)
    pad_seq_len = 0
    plans_each_step = False

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        *,
        max_rows: int,
        max_len: int,
        config: DecodeConfig | None = None,
        num_sms: int | None = None,
    ) -> None:
        if config is None:
            config = replace(TRITON, pdl=can_overlap(device))
        num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self.decode_plan = SplitPlan(shape, config, num_sms, max_rows, max_len)
        self.workspace = DecodeWorkspace.allocate(self.decode_plan, device)

    def splits(self, rows: int) -> int:
        """Programs that share a row and KV head in a decode of `rows`."""
        return self.decode_plan.splits(rows)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return LiveTensors(self, "workspace.parts", "workspace.levels", "workspace.arrived")

    def plan(self, seq_lens: Sequence[int] | np.ndarray[Any, Any], block_tables: torch.Tensor) -> None:
        """Nothing to do: lengths are read by the kernels."""

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `AttentionBackend.decode`. Raises InputError for more than `max_rows` rows."""
        if q.shape[0] > self.decode_plan.max_rows:
            raise InputError(
                f"attention: {q.shape[0]} rows, but the workspace was made for {self.decode_plan.max_rows}; "
                "make the backend with a larger max_rows"
            )
        paged_decode(q, kv, block_tables, seq_lens, out, self.decode_plan, self.workspace)

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if q.shape[0] == seq_lens.shape[0] == 1:  # a decode row, whose context many programs share
            self.decode(q, kv, block_tables, seq_lens, out)
        else:
            plan = self.decode_plan
            paged_prefill(q, kv, block_tables, seq_lens, query_start, out, plan.shape, plan.num_sms)
