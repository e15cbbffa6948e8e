"""One fused operation on random numbers, against torch in float32 on the CPU; under the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.ops.fused import launches, small
from stepgraph.ops.fused.tiling import Tile
from stepgraph.ops.layer import StepGeometry, inverse_frequencies, norm_qkv_rope_write, rotary_tables
from stepgraph.ops.norm import Norm
from stepgraph.ops.operations import Places

EPS, BLOCK_SIZE, BLOCKS_A_ROW = 1e-5, 16, 4
OPERATIONS = ("linear", "norm_linear", "linear_add", "swiglu", "qkv", "rope_write", "rms_norm", "silu_mul", "embed")


@dataclass(frozen=True)
class Case:
    """heads: query heads, KV heads, head size; of `qkv` and `rope_write`. extra: a bias, or norms of heads."""

    operation: str
    rows: int
    out: int
    width: int
    heads: tuple[int, int, int]
    extra: bool
    tile: Tile
    seed: int


def error(case: Case, device: torch.device | str, dtype: torch.dtype, *, overlap: bool) -> float:
    """Relative, of all that the operation writes. What it must not write is checked."""
    noise = torch.Generator().manual_seed(case.seed)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=noise) * scale).to(dtype)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    rows, out, width = case.rows, case.out, case.width
    x, weight = random(rows, width, scale=3.0), random(out, width, scale=width**-0.5)
    scale = 1 + random(width, scale=0.2)
    norm, normed = Norm(there(scale), EPS), F.rms_norm(x.float(), (width,), scale.float(), EPS)
    if case.operation in ("linear", "norm_linear"):
        has_norm = case.operation == "norm_linear"
        bias = random(out) if case.extra else None
        got = launches.linear(
            there(x), there(weight), case.tile, norm=norm if has_norm else None,
            bias=None if bias is None else there(bias), overlap=overlap,
        )  # fmt: skip
        want = F.linear(normed if has_norm else x.float(), weight.float(), None if bias is None else bias.float())
    elif case.operation == "linear_add":
        residual = random(rows, out)
        got, want = there(residual.clone()), residual.float() + F.linear(x.float(), weight.float())
        launches.linear_add(there(x), there(weight), got, case.tile, overlap=overlap)
    elif case.operation == "swiglu":
        weight = random(2 * out, width, scale=width**-0.5)
        got = launches.norm_gate_up_swiglu(there(x), norm, there(weight), case.tile, overlap=overlap)
        gate, up = F.linear(normed, weight.float()).chunk(2, dim=-1)
        want = F.silu(gate) * up
    elif case.operation == "rms_norm":
        got, want = small.rms_norm(there(x), norm.weight, EPS, overlap=overlap), normed
    elif case.operation == "silu_mul":
        gate_up = random(rows, 2 * width, scale=3.0)
        gate, up = gate_up.float().chunk(2, dim=-1)
        got, want = small.silu_mul(there(gate_up), overlap=overlap), F.silu(gate) * up
    elif case.operation == "embed":
        tokens = torch.randint(out, (rows,), generator=noise)
        got, want = small.embed(there(tokens), there(weight), overlap=overlap), weight[tokens].float()
    else:
        return _attention_inputs(case, there, random, x, norm, scale, overlap=overlap)
    return _distance(got, want)


def _attention_inputs(case: Case, there, random, x, norm: Norm, scale, *, overlap: bool) -> float:  # type: ignore[no-untyped-def]
    num_heads, kv_heads, size = case.heads
    rows, dtype = case.rows, x.dtype
    weight = random((num_heads + 2 * kv_heads) * size, case.width, scale=case.width**-0.5)
    cos, sin = rotary_tables(
        inverse_frequencies(size, 10000.0), BLOCK_SIZE * BLOCKS_A_ROW, torch.float32, torch.device("cpu")
    )
    positions = torch.arange(rows) * 7 % (BLOCK_SIZE * BLOCKS_A_ROW)
    tables = torch.arange(1, 1 + BLOCKS_A_ROW * rows, dtype=torch.int32).view(rows, BLOCKS_A_ROW)
    layers = torch.full((1 + BLOCKS_A_ROW * rows, 2, 2, BLOCK_SIZE, kv_heads, size), 7.0, dtype=dtype)
    want_kv, kv = layers[:, 1].float(), there(layers)[:, 1]  # one layer of two, so that it is strided
    blocks = tables.gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1).long()
    turned = (cos.to(dtype).float()[positions].unsqueeze(1), sin.to(dtype).float()[positions].unsqueeze(1))
    geometry = StepGeometry(*turned, blocks, positions % BLOCK_SIZE)
    places, tables_of_angles = Places(there(positions), there(tables)), (there(cos.to(dtype)), there(sin.to(dtype)))
    if case.operation == "qkv":
        bias = random(len(weight)) if case.extra else None
        want = norm_qkv_rope_write(
            x.float(), scale.float(), EPS, weight.float(), geometry, want_kv, num_heads,
            qkv_bias=None if bias is None else bias.float(),
        )  # fmt: skip
        moved = None if bias is None else there(bias)
        got = launches.norm_qkv_rope_write(
            there(x), norm, there(weight), moved, places, *tables_of_angles, kv, num_heads, case.tile, overlap=overlap
        )
    else:
        norms = [1 + random(size, scale=0.2) for _ in range(2)] if case.extra else [None, None]
        qkv = random(rows, len(weight), scale=2.0)
        split = [part.float() for part in qkv.view(rows, -1, size).split((num_heads, kv_heads, kv_heads), dim=1)]
        for index, weight_of_heads in enumerate(norms):
            part = split[index]
            if weight_of_heads is not None:
                part = F.rms_norm(part, (size,), weight_of_heads.float(), EPS)
            split[index] = part * geometry.cos + part.roll(size // 2, dims=-1) * geometry.sin
        want = split[0]
        want_kv.permute(0, 2, 1, 3, 4).index_put_((blocks, geometry.offsets), torch.stack(split[1:], dim=1))
        moved = [None if one is None else there(one) for one in norms]
        projected = there(qkv)
        small.rope_write(
            projected, places.positions, places.block_tables, *tables_of_angles, kv, num_heads,
            q_norm=moved[0], k_norm=moved[1], eps=EPS, overlap=overlap,
        )  # fmt: skip
        got = projected[:, : num_heads * size].view(rows, num_heads, size)
    written = (want_kv != 7.0).flatten(2).any(-1)
    assert torch.equal((kv.float().cpu() != 7.0).flatten(2).any(-1), written), "keys or values elsewhere"
    return max(_distance(got, want), _distance(kv, want_kv))


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = got.float().cpu() - want
    return float("inf") if difference.isnan().any() else float(difference.norm() / want.norm())
