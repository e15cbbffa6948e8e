"""The CUDA C++ projections without a GPU: the kernel's own text, emulated, against torch in float32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # the launches beside it are Triton's
from ops.fused.cases import Case, error
from ops.fused.emulator import EmulatedKernel

from stepgraph.ops import nvrtc
from stepgraph.ops.fused import cuda_projection
from stepgraph.ops.fused.cuda_projection import supports
from stepgraph.ops.fused.tiling import Tile

emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled by g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["early", "late"])
def copies(request: pytest.FixtureRequest) -> str:
    """When copies to shared memory happen: as they are asked for, or as they are waited for."""
    return request.param


def cuda(outputs: int, warps: int, stages: int) -> Tile:
    return Tile(outputs, 64, warps, stages, "cuda")


SIZES = [  # rows, out, width, tile, dtype
    (1, 32, 64, cuda(16, 2, 2), torch.bfloat16),  # fewer steps than warps
    (1, 16, 640, cuda(16, 2, 3), torch.float16),
    (3, 64, 448, cuda(32, 4, 2), torch.bfloat16),  # warps with unequal shares
    (8, 32, 192, cuda(16, 4, 4), torch.float16),
    (13, 32, 320, cuda(32, 2, 2), torch.bfloat16),
    (17, 16, 256, cuda(16, 2, 2), torch.bfloat16),
]


def wrong_by(case: Case, dtype: torch.dtype, folder: Path, patch: pytest.MonkeyPatch, copies: str, hide: str) -> float:
    def make(source: str, name: str, defines: dict[str, int]) -> EmulatedKernel:
        return EmulatedKernel(folder, defines, late=copies == "late", hide=hide)

    patch.setattr(cuda_projection, "CudaKernel", make)
    cuda_projection._kernel.cache_clear()
    try:
        return error(case, "cpu", dtype, overlap=True)
    finally:
        cuda_projection._kernel.cache_clear()


@emulated
@pytest.mark.parametrize("operation", ["linear", "norm_linear", "linear_add", "swiglu"])
@pytest.mark.parametrize(("rows", "out", "width", "tile", "dtype"), SIZES)
def test_it_agrees_with_torch(operation, rows, out, width, tile, dtype, copies, folder, monkeypatch) -> None:
    case = Case(operation, rows, out, width, (1, 1, 16), True, tile, rows)
    hide = "out" if operation == "linear_add" else "x"
    assert wrong_by(case, dtype, folder, monkeypatch, copies, hide) < 5e-3


@emulated
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "tile"),
    [(1, (4, 2, 16), cuda(16, 2, 2)), (5, (3, 1, 32), cuda(32, 2, 2)), (9, (2, 2, 64), cuda(16, 2, 2))],
)
def test_queries_keys_and_values(rows, heads, tile, bias, copies, folder, monkeypatch) -> None:
    case = Case("qkv", rows, 0, 256, heads, bias, tile, rows)
    assert wrong_by(case, torch.bfloat16, folder, monkeypatch, copies, "x") < 1e-2


def test_what_the_kernel_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    tile, weight = cuda(16, 8, 4), torch.empty(256, 128, dtype=torch.bfloat16)
    assert supports(tile, 1, weight) and supports(tile, 16, weight, pairs=64)
    assert not supports(tile, 33, weight)
    assert not supports(tile, 1, weight.float())
    assert not supports(tile, 1, weight[:, :96])
    assert not supports(tile, 1, weight[:250])
    assert not supports(tile, 1, weight, pairs=36)
    assert not supports(cuda(64, 16, 8), 1, weight)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert not supports(tile, 1, weight)
