"""Each fused operation on a GPU, by Triton and by CUDA C++, against torch in float32: odd sizes and real shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from stepgraph.ops.fused.tiling import Tile, Tiles

pytest.importorskip("triton")

from ops.fused.cases import OPERATIONS, Case, error  # noqa: E402
from ops.fused.strategies import cases  # noqa: E402

pytestmark = pytest.mark.gpu

MOST = 1e-2  # relative error of an operation in half precision
REAL = {  # out, width, heads
    "8B": (4096, 4096, (32, 8, 128)),
    "1B": (2048, 2048, (32, 8, 64)),
    "a wide MLP": (1024, 14336, (8, 8, 128)),
}


def overlaps() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_odd_sizes(operation: str) -> None:
    pytest.importorskip("triton")

    @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases(operation, most_out=300, most_width=700))
    def right(case: Case) -> None:
        dtype = (torch.bfloat16, torch.float16)[case.seed % 2]
        assert error(case, "cuda", dtype, overlap=overlaps()) < MOST, (case, dtype)

    right()


@pytest.mark.parametrize("operation", ["linear", "norm_linear", "linear_add", "swiglu", "qkv"])
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.bfloat16), (1, torch.float16), (3, torch.bfloat16), (8, torch.float16), (16, torch.bfloat16)]
    + [(17, torch.bfloat16)],
    ids=str,
)
def test_the_cuda_kernel(operation: str, rows: int, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings")
    case = Case(operation, rows, 256, 704, (6, 2, 64), True, Tile(16, 64, 8, 3, "cuda"), rows)
    for tile in (case.tile, Tile(32, 64, 2, 2, "cuda")):
        assert error(replace(case, tile=tile), "cuda", dtype, overlap=overlaps()) < MOST, tile


@pytest.mark.parametrize("kernel", ["triton", "cuda"])
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_real_shapes(kernel: str, shape: str, rows: int) -> None:
    out, width, heads = REAL[shape]
    for operation, name in (("norm_linear", "lm_head"), ("linear_add", "down"), ("swiglu", "gate_up"), ("qkv", "qkv")):
        tile = Tile(16, 64, 8, 3, "cuda")
        if kernel == "triton":
            tile = Tiles().choose(name, out, width, 1).tile if rows == 1 else Tile(32, 256, 4, 3)
        else:
            pytest.importorskip("cuda.bindings")
        case = Case(operation, rows, out, width, heads, False, tile, rows)
        assert error(case, "cuda", torch.bfloat16, overlap=overlaps()) < MOST, case
