"""A decoder layer as five operations: the torch reference, on any device. The truth in tests.

Attention, the second of the five, has a folder of its own (`ops/attention`). Shapes: `rows` is tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.ops.linear import linear
from stepgraph.ops.lora import Adapt


@dataclass(frozen=True)
class StepGeometry:
    """Where this step's rows stand: computed once a step and shared by all layers.

    cos, sin: [rows, 1, head_dim] in the model's dtype; the first half of `sin` is negated, so that rotating by
        half a head and multiplying is the whole of a rotary embedding.
    blocks, offsets: int64 [rows]; the KV block and the place in it that a row writes. Padded rows: block 0.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Radians a position of each pair of a head's elements, unscaled: float32 [head_dim / 2], on the CPU.

    Source: RoFormer (arXiv:2104.09864).
    """
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotary_tables(
    frequencies: torch.Tensor, max_positions: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, each [max_positions, head_dim]; computed in float32.

    frequencies: float32 [head_dim / 2]. scale: multiplies both. The form is the half-rotation of Hugging Face's Llama.
    """
    angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((cos, cos), dim=-1).to(device, dtype), torch.cat((-sin, sin), dim=-1).to(device, dtype)


def norm_qkv_rope_write(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    qkv_weight: torch.Tensor,
    geometry: StepGeometry,
    kv: torch.Tensor,
    num_heads: int,
    *,
    qkv_bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    adapt: Adapt | None = None,
) -> torch.Tensor:
    """RMSNorm, QKV projection, rotary embedding, and this step's keys and values written to the cache.

    x: [rows, hidden]. qkv_weight: [(heads + 2 x kv_heads) x head_dim, hidden], Q then K then V; qkv_bias in that order.
    q_norm, k_norm: [head_dim], the weights of an RMSNorm of every query and key head before the rotary embedding.
    kv: one layer of the cache, [blocks, 2, block_size, kv_heads, head_dim]; written in place.
    adapt: of the projection, bias included.
    Returns q: [rows, heads, head_dim], a view of the projection.
    """
    kv_heads, head_dim = kv.shape[-2:]
    projected = _adapted(F.rms_norm(x, norm_weight.shape, norm_weight, eps), qkv_weight, qkv_bias, adapt)
    qkv = projected.view(x.shape[0], num_heads + 2 * kv_heads, head_dim)
    for heads, weight in ((slice(num_heads), q_norm), (slice(num_heads, num_heads + kv_heads), k_norm)):
        if weight is not None:
            qkv[:, heads] = F.rms_norm(qkv[:, heads], weight.shape, weight, eps)
    rotated = qkv[:, : num_heads + kv_heads]
    half_turned = rotated.roll(head_dim // 2, dims=-1)
    rotated.mul_(geometry.cos).addcmul_(half_turned, geometry.sin)
    new = qkv[:, num_heads:].view(x.shape[0], 2, kv_heads, head_dim)
    kv.permute(0, 2, 1, 3, 4).index_put_((geometry.blocks, geometry.offsets), new)
    return qkv[:, :num_heads]


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    adapt: Adapt | None = None,
    reduce: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None,
) -> torch.Tensor:
    """x [rows, in] through weight [out, in], plus residual [rows, out]. adapt: of the projection.

    reduce: where ranks have a part of `in` each; see `operations.Reduce`.
    """
    out = _adapted(x, weight, None, adapt)
    return out.add_(residual) if reduce is None else reduce(out, residual)


def norm_gate_up_swiglu(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up_weight: torch.Tensor, adapt: Adapt | None = None
) -> torch.Tensor:
    """RMSNorm, the gate and up projections as one, and silu(gate) x up.

    x: [rows, hidden]. gate_up_weight: [2 x intermediate, hidden], gate first. adapt: of the projection.
    Returns [rows, intermediate].
    """
    normed = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    gate, up = _adapted(normed, gate_up_weight, None, adapt).chunk(2, dim=-1)
    return F.silu(gate) * up


def _adapted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adapt: Adapt | None) -> torch.Tensor:
    out = linear(x, weight, bias)
    if adapt is not None:
        adapt(x, out)
    return out
