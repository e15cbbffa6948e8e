"""What adapters add to a projection: the reference row by row, and its Triton form beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.captured import capture
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


def test_a_norm_that_comes_along_is_that_of_the_projection() -> None:
    case = lora_case(rows=13, width=40, ends=(64, 80, 96), active=3, norm=True, seed=3)
    out = case.out.clone()
    ReferenceLora(case.rows)(case.pair, case.x, out, case.norm)
    assert distance(out, case.want()) < 1e-6


def test_the_triton_form_agrees_under_the_interpreter() -> None:
    check_interpreted("interpreted_lora.py")


WIDTHS = {  # of Llama-3-8B: columns in, ends of the parts
    "qkv": (4096, (4096, 5120, 6144)),
    "attention_out": (4096, (4096,)),
    "gate_up": (4096, (14336, 28672)),
    "down": (14336, (4096,)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run where there is a GPU")
@pytest.mark.parametrize("projection", WIDTHS)
def test_the_kernels_compile_for_hopper(projection: str) -> None:
    """What is no program to a compiler may pass the interpreter."""
    pytest.importorskip("triton")
    from ops.compiling import compiled_kernels

    from stepgraph.ops.lora.triton_lora import TritonLora

    width, ends = WIDTHS[projection]
    for rows, rank, norm in ((16, 16, True), (16, 64, False), (64, 16, True), (64, 64, False)):
        case = lora_case(rows=rows, width=width, ends=ends, active=2, norm=norm, rank=rank, dtype=torch.bfloat16)
        lora = TritonLora(case.rows, overlap=True)
        launched = compiled_kernels(lambda lora=lora, case=case: lora(case.pair, case.x, case.out, case.norm))
        if rows == 16:
            assert launched == ["_shrink_row", "_expand_row"]
        else:
            assert launched == ["_rms_norm"] * norm + ["_shrink_tile", "_expand_tile"]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_the_triton_form_agrees(dtype: torch.dtype, bound: float, rows: int, rank: int, norm: bool) -> None:
    from stepgraph.ops.lora.triton_lora import TritonLora

    for width, ends in (*WIDTHS.values(), (1100, (700, 1400))):
        case = lora_case(
            rows=rows, width=width, ends=ends, active=3, norm=norm, rank=rank, dtype=dtype, device="cuda", seed=rows
        )
        out = case.out.clone()
        TritonLora(case.rows)(case.pair, case.x, out, case.norm)
        assert distance(out, case.want()) < bound
        none = case.rows.index < 0
        assert torch.equal(out[none], case.out[none])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_they_wait_for_the_kernel_in_front(monkeypatch: pytest.MonkeyPatch, rows: int, norm: bool) -> None:
    """It lets them start at once, and writes the projection and x late."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    from ops.late_writer import write_late

    from stepgraph.ops.fused import small
    from stepgraph.ops.lora import triton_rows, triton_tiles
    from stepgraph.ops.lora.triton_lora import TritonLora

    case = lora_case(
        rows=rows, width=4096, ends=(4096, 6144), active=3, norm=norm, dtype=torch.bfloat16, device="cuda", seed=2
    )
    index = torch.ones_like(case.rows.index)
    x, projected = case.x.nan_to_num(0.5), case.out.clone()
    case = replace(case, rows=LoraRows(index, index, 3), x=x.clone())
    want = case.want().cpu()

    def right(lora: TritonLora) -> list[bool]:
        def step() -> None:
            write_late(projected, case.out)
            write_late(x, case.x)
            lora(case.pair, case.x, case.out, case.norm)

        graph, found = capture(step), []
        for _ in range(3):
            for tensor in (case.x, case.out):
                tensor.fill_(float("nan"))
            torch.cuda.synchronize()
            graph.replay()
            found.append(bool((case.out.cpu() - want).norm() <= 1e-2 * want.norm()))  # not where there is NaN
        return found

    assert all(right(TritonLora(case.rows)))
    for module in (small, triton_rows, triton_tiles):  # without their waits they start early all the same
        monkeypatch.setattr(module, "launched", lambda overlap: {"launch_pdl": True})
    assert not any(right(TritonLora(case.rows, overlap=False))), "a missing wait was not caught"
