"""The CUDA C++ projections without a GPU: the kernel's own text, emulated, against torch in float32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ops.fused.emulator import EmulatedKernel

from stepgraph.ops import nvrtc
from stepgraph.ops.fused import cuda_projection
from stepgraph.ops.fused.cuda_projection import Turn, project, supports
from stepgraph.ops.fused.tiling import Tile
from stepgraph.ops.layer import StepGeometry, inverse_frequencies, norm_qkv_rope_write, rotary_tables

EPS = 1e-5
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled by g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulate(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """(late, hidden): kernels are emulated from now on, with late or early copies; `hidden` is NaN until the wait."""

    def start(late: bool, hidden: torch.Tensor | None) -> None:
        monkeypatch.setattr(
            cuda_projection, "CudaKernel", lambda source, name, defines: EmulatedKernel(folder, defines, late, hidden)
        )
        cuda_projection._kernel.cache_clear()

    yield start
    cuda_projection._kernel.cache_clear()


def noise(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5).to(dtype)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


CASES = [  # rows, outputs, width, tile, dtype
    (1, 32, 64, Tile(16, 64, 2, 2, "cuda"), torch.bfloat16),
    (1, 16, 640, Tile(16, 64, 2, 3, "cuda"), torch.float16),
    (3, 64, 448, Tile(32, 64, 4, 2, "cuda"), torch.bfloat16),
    (8, 32, 192, Tile(16, 64, 4, 4, "cuda"), torch.float16),
    (13, 32, 320, Tile(32, 64, 2, 2, "cuda"), torch.bfloat16),
    (17, 16, 256, Tile(16, 64, 2, 2, "cuda"), torch.bfloat16),
]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(("rows", "out", "width", "tile", "dtype"), CASES)
def test_linear_add_and_swiglu(emulate, rows, out, width, tile, dtype, late) -> None:
    x = noise(rows, width, seed=1, dtype=dtype) * width**0.5
    weight, bias = noise(out, width, seed=2, dtype=dtype), noise(out, seed=3, dtype=dtype)
    scale = 1 + 0.2 * noise(width, seed=4, dtype=dtype)
    normed = F.rms_norm(x.float(), (width,), scale.float(), EPS)

    emulate(late, x)
    got = torch.full((rows, out), float("nan"), dtype=dtype)
    project("STORE", x, weight, got, tile, norm=(scale, EPS), bias=bias, overlap=True)
    assert off(got, F.linear(normed, weight.float(), bias.float())) < 5e-3

    residual = noise(rows, out, seed=5, dtype=dtype)
    want = residual.float() + F.linear(x.float(), weight.float())
    emulate(late, residual)
    project("ADD", x, weight, residual, tile, overlap=True)
    assert off(residual, want) < 5e-3

    if out % (2 * tile.outputs // 2) == 0:
        gate, up = F.linear(normed, weight.float()).chunk(2, dim=-1)
        got = torch.full((rows, out // 2), float("nan"), dtype=dtype)
        emulate(late, x)
        project("SWIGLU", x, weight, got, tile, norm=(scale, EPS), overlap=True)
        assert off(got, F.silu(gate) * up) < 5e-3


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "heads", "tile"), [(1, (4, 2, 16), 16), (5, (3, 1, 32), 32), (9, (2, 2, 64), 16)])
def test_qkv(emulate, rows, heads, tile, has_bias, late) -> None:
    num_heads, kv_heads, size = heads
    width, dtype = 256, torch.bfloat16
    x = noise(rows, width, seed=1, dtype=dtype) * 3
    weight = noise((num_heads + 2 * kv_heads) * size, width, seed=2, dtype=dtype)
    bias = noise(len(weight), seed=3, dtype=dtype) if has_bias else None
    scale = 1 + 0.2 * noise(width, seed=4, dtype=dtype)
    cos, sin = rotary_tables(inverse_frequencies(size, 10000.0), 80, torch.float32, torch.device("cpu"))
    positions = torch.arange(rows) * 7 % 64
    tables = torch.arange(1, 1 + 4 * rows, dtype=torch.int32).view(rows, 4)
    kv = torch.zeros(1 + 4 * rows, 2, 2, 16, kv_heads, size, dtype=dtype)[:, 1]  # a layer of two: strided
    want_kv = kv.float()
    blocks = tables.gather(1, (positions // 16)[:, None]).squeeze(1).long()
    geometry = StepGeometry(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), blocks, positions % 16)
    want = norm_qkv_rope_write(
        x.float(), scale.float(), EPS, weight.float(), geometry, want_kv, num_heads,
        qkv_bias=None if bias is None else bias.float(),
    )  # fmt: skip

    turn = Turn(positions, tables, cos.to(dtype), sin.to(dtype), kv, num_heads)
    q = torch.full((rows, num_heads, size), float("nan"), dtype=dtype)
    emulate(late, x)
    project("QKV", x, weight, q, Tile(tile, 64, 2, 2, "cuda"), norm=(scale, EPS), bias=bias, turn=turn, overlap=True)
    assert off(q, want) < 1e-2
    assert off(kv, want_kv) < 1e-2
    assert torch.equal(kv != 0, want_kv != 0)


def test_what_the_kernel_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    tile, weight = Tile(16, 64, 8, 4, "cuda"), torch.empty(256, 128, dtype=torch.bfloat16)
    assert supports(tile, 1, weight) and supports(tile, 16, weight, pairs=64)
    assert not supports(tile, 33, weight)
    assert not supports(tile, 1, weight.float())
    assert not supports(tile, 1, weight[:, :96])
    assert not supports(tile, 1, weight[:250])
    assert not supports(tile, 1, weight, pairs=36)
    assert not supports(Tile(64, 64, 16, 8, "cuda"), 1, weight)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert not supports(tile, 1, weight)
