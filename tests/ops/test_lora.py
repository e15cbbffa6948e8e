"""What adapters add to a projection: the reference row by row, and its Triton form beside it."""

from __future__ import annotations

import pytest
import torch
from ops.interpreter import check_interpreted
from ops.layers import distance
from ops.lora_cases import lora_case

from stepgraph.ops.lora import LoraRows, ReferenceLora

SHAPES = [  # rows, columns in, ends of the parts, active adapters
    (1, 32, (48,), 1),
    (13, 40, (64, 80, 96), 3),
    (5, 24, (30, 60), 4),
    (40, 32, (64, 96, 128), 2),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_gets_its_own_adapter_or_none(shape: tuple) -> None:
    rows, width, ends, active = shape
    case = lora_case(rows=rows, width=width, ends=ends, active=active, seed=rows)
    out = case.out.clone()
    ReferenceLora(case.rows)(case.pair, case.x, out)
    assert distance(out, case.want()) < 1e-6
    none = case.rows.index < 0
    assert torch.equal(out[none], case.out[none])  # to the bit, though such a row's inputs are NaN


def test_a_larger_case_gives_the_same() -> None:
    case = lora_case(rows=13, width=40, ends=(64, 80, 96), active=2, seed=5)
    small, large = case.out.clone(), case.out.clone()
    ReferenceLora(case.rows)(case.pair, case.x, small)
    ReferenceLora(LoraRows(case.rows.index, case.rows.slot, 4))(case.pair, case.x, large)
    assert distance(small, large) < 1e-6


def test_the_triton_form_agrees_under_the_interpreter() -> None:
    check_interpreted("interpreted_lora.py")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize("rank", [16, 64])
def test_the_triton_form_agrees(dtype: torch.dtype, bound: float, rows: int, rank: int) -> None:
    from stepgraph.ops.lora.triton_lora import TritonLora

    for width, ends in ((4096, (4096, 5120, 6144)), (1100, (700, 1400)), (14336, (4096,)), (4096, (14336, 28672))):
        case = lora_case(rows=rows, width=width, ends=ends, active=3, rank=rank, dtype=dtype, device="cuda", seed=rows)
        out = case.out.clone()
        TritonLora(case.rows)(case.pair, case.x, out)
        assert distance(out, case.want()) < bound
        none = case.rows.index < 0
        assert torch.equal(out[none], case.out[none])
