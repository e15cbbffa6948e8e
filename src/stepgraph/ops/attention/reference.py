"""Attention in plain torch: the truth in tests, and the backend of the CPU.

Decode and prefill are one custom operator each, so that a tape records them as one opaque entry which reads lengths and
block tables whenever it is replayed, and works for real lengths only. They are registered with `torch.library.define`:
the `custom_op` wrapper adds 15 microseconds to a call, and a decode step makes one call per layer.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.ops.attention.contract import AttentionShape
from stepgraph.ops.attention.gather import PlanMemo, unit_view
from stepgraph.runtime.support import AttentionCGSupport

_plans = PlanMemo()


class ReferenceAttention:
    """The torch reference. A GPU cannot capture it, since it reads lengths on the host; a tape can."""

    name = "reference"
    max_query_len: int | None = None
    device_types: tuple[str, ...] = ("cpu", "cuda")
    pad_seq_len = 0
    plans_each_step = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.support = AttentionCGSupport.ALWAYS if device.type == "cpu" else AttentionCGSupport.NEVER
        self._scale, self._window = shape.scale, shape.window

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def plan(self, seq_lens: Sequence[int] | np.ndarray[Any, Any], block_tables: torch.Tensor) -> None:
        """Nothing to do: lengths are read inside the operator."""

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        torch.ops.stepgraph.reference_decode(q, kv, block_tables, seq_lens, out, self._scale, self._window)

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        torch.ops.stepgraph.reference_prefill(
            q, kv, block_tables, seq_lens, query_start, out, self._scale, self._window
        )


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    _, num_heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    units = unit_view(kv)
    reach = None if window is None else (window,) * len(seq_lens)
    plan = _plans.get(kv, block_tables, seq_lens, merge=True, reach=reach)
    for chunk in plan.chunks:
        batch, compute = chunk.num_rows * kv_heads, chunk.bias.dtype
        held = units.index_select(0, chunk.index).view(2, batch, chunk.max_len, head_dim)
        keys, values = held.to(compute).unbind()
        queries = q[chunk.rows].reshape(batch, num_heads // kv_heads, head_dim).to(compute)
        weights = torch.baddbmm(chunk.bias, queries, keys.mT, alpha=scale).softmax(-1)
        out[chunk.rows] = torch.bmm(weights, values).view(chunk.num_rows, num_heads, head_dim).to(out.dtype)
    if plan.empty is not None:
        out[plan.empty] = 0


def _prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    head_dim, kv_heads = q.shape[2], kv.shape[3]
    units = unit_view(kv)
    starts = query_start.tolist()
    # The first of a request's queries sees the furthest back.
    reach = None if window is None else tuple(window - 1 + last - first for first, last in pairwise(starts))
    used = seq_lens * (query_start.diff() > 0)
    for chunk in _plans.get(kv, block_tables, used, merge=False, reach=reach).chunks:  # one request each
        assert isinstance(chunk.rows, slice)
        first, last = starts[chunk.rows.start], starts[chunk.rows.stop]
        keys, values = units.index_select(0, chunk.index).view(2, 1, kv_heads, chunk.max_len, head_dim).unbind()
        mask = _visible(last - first, chunk.max_len, window, q.device)
        result = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[first:last] = result[0].transpose(0, 1)


def _visible(num_queries: int, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which of `length` tokens the last `num_queries` of them see; None where torch's own causal mask says it."""
    windowed = window is not None and window < length
    if num_queries == length and not windowed:
        return None
    before = length - num_queries
    mask = torch.ones(num_queries, length, dtype=torch.bool, device=device).tril_(before)
    return mask.triu_(before - window + 1) if window is not None and windowed else mask


def _returns_nothing(*_: object) -> None:
    """The fake form of both: they write `out` and return nothing."""


torch.library.define(
    "stepgraph::reference_decode",
    "(Tensor q, Tensor kv, Tensor block_tables, Tensor seq_lens, Tensor(a!) out, float scale, int? window) -> ()",
)
torch.library.impl("stepgraph::reference_decode", "default", _decode)
torch.library.register_fake("stepgraph::reference_decode", _returns_nothing)
torch.library.define(
    "stepgraph::reference_prefill",
    "(Tensor q, Tensor kv, Tensor block_tables, Tensor seq_lens, Tensor query_start, Tensor(a!) out, float scale,"
    " int? window) -> ()",
)
torch.library.impl("stepgraph::reference_prefill", "default", _prefill)
torch.library.register_fake("stepgraph::reference_prefill", _returns_nothing)
