"""Kernels that start before the one in front has ended: none reads or writes too early.

The kernel in front lets the next one start at once, spins, and does its work last. Where a kernel reads or overwrites
what that one writes or reads, the same is done with the wait taken out, which must be caught. Needs a GPU of compute
capability 9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from ops.captured import capture

pytestmark = pytest.mark.gpu

WIDTH, SIZE, ROW = 256, 64, 512
BY_TRITON = ("linear", "linear_add", "swiglu", "qkv", "rms_norm", "rope_write", "silu_mul")
KINDS = [*((kind, "triton") for kind in BY_TRITON), *((kind, "cuda") for kind in BY_TRITON[:4])]


@pytest.fixture(params=[1, 4], ids=["one row", "four rows"])
def rows(request: pytest.FixtureRequest) -> int:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")
    return request.param


@contextmanager
def without_waits() -> Iterator[None]:
    """Kernels that are launched without overlap start early all the same, and they have no wait."""
    from stepgraph.ops.fused import launches, small
    from stepgraph.ops.nvrtc import CudaKernel

    launch = CudaKernel.launch
    with pytest.MonkeyPatch.context() as patch:
        for module in (launches, small):
            patch.setattr(module, "launched", lambda overlap: {"launch_pdl": True})
        patch.setattr(CudaKernel, "launch", lambda self, *a, **k: launch(self, *a, **{**k, "overlap": True}))
        yield


def random(*size: int, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=noise, device="cuda").bfloat16()


class Kernel:
    """One launch of one kind, which reads `x` [rows, WIDTH] and writes `out`."""

    def __init__(self, kind: str, kernel: str, rows: int) -> None:
        from stepgraph.ops.fused.tiling import Tile
        from stepgraph.ops.norm import Norm
        from stepgraph.ops.operations import Places

        self.kind, self.x, self.out = kind, random(rows, WIDTH, seed=9), random(rows, ROW, seed=3)
        self._tile = Tile(16, 64, 2, 2, "cuda") if kernel == "cuda" else Tile(16, 64, 4, 3 if rows > 1 else 1)
        self._weight = random(ROW, WIDTH, seed=1) * WIDTH**-0.5
        self._norm = Norm(random(WIDTH, seed=2), 1e-5)
        tables = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")[:, None].contiguous()
        self._places = Places(torch.arange(rows, device="cuda"), tables)
        self._angles = random(16, SIZE, seed=4), random(16, SIZE, seed=5)
        kv_heads = 1 if kind == "rope_write" else 2  # with 2 or 4 query heads all heads are x's, or the weight's, width
        self._kv = torch.zeros(rows + 1, 2, 16, kv_heads, SIZE, dtype=torch.bfloat16, device="cuda")

    def __call__(self, *, overlap: bool) -> None:
        from stepgraph.ops.fused import launches, small

        x, norm, tile = self.x, self._norm, self._tile
        if self.kind == "linear":
            self.out = launches.linear(x, self._weight, tile, norm=norm, overlap=overlap)
        elif self.kind == "linear_add":
            launches.linear_add(x, self._weight, self.out, tile, overlap=overlap)
        elif self.kind == "swiglu":
            self.out = launches.norm_gate_up_swiglu(x, norm, self._weight, tile, overlap=overlap)
        elif self.kind == "rms_norm":
            self.out = small.rms_norm(x, norm.weight, norm.eps, overlap=overlap)
        elif self.kind == "silu_mul":
            self.out = small.silu_mul(x, overlap=overlap)
        elif self.kind == "qkv":
            self.out = launches.norm_qkv_rope_write(
                x, norm, self._weight, None, self._places, *self._angles, self._kv, 4, tile, overlap=overlap
            )
        else:
            small.rope_write(
                x, self._places.positions, self._places.block_tables, *self._angles, self._kv, 2,
                q_norm=None, k_norm=None, eps=1e-5, overlap=overlap,
            )  # fmt: skip
            self.out = self._kv


def replays(
    step: Callable[[], None], before: Callable[[], None], result: Callable[[], torch.Tensor]
) -> list[torch.Tensor]:
    """`result` after each of three replays of a graph of `step`; `before` runs in front of each."""
    graph = capture(step)
    found = []
    for _ in range(3):
        before()
        torch.cuda.synchronize()
        graph.replay()
        found.append(result().clone())
    return found


def right(found: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((found - want).float().norm() <= 1e-2 * want.float().norm())  # not where there is NaN


@pytest.mark.parametrize(("kind", "kernel"), KINDS)
def test_no_kernel_reads_before_the_one_in_front_has_written(rows: int, kind: str, kernel: str) -> None:
    from ops.late_writer import write_late

    made = Kernel(kind, kernel, rows)
    staged, residual = made.x.clone(), made.out.clone()
    made(overlap=True)
    want = made.out.clone()

    def before() -> None:
        made.x.fill_(float("nan"))
        if kind == "linear_add":
            made.out.copy_(residual)

    def found(overlap: bool) -> list[torch.Tensor]:
        def step() -> None:
            write_late(staged, made.x)
            made(overlap=overlap)

        return replays(step, before, lambda: made.out)

    assert all(right(one, want) for one in found(True))
    with without_waits():
        assert not any(right(one, want) for one in found(False)), "a missing wait was not caught"


@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_no_kernel_overwrites_what_the_one_in_front_still_reads(rows: int, kernel: str) -> None:
    from ops.late_writer import write_late

    made = Kernel("linear_add", kernel, rows)
    residual, seen = made.out.clone(), torch.empty_like(made.out)

    def found(overlap: bool) -> list[torch.Tensor]:
        def step() -> None:
            write_late(made.out, seen)
            made(overlap=overlap)

        return replays(step, lambda: made.out.copy_(residual), lambda: seen)

    assert all(torch.equal(one, residual) for one in found(True))
    with without_waits():
        assert not any(torch.equal(one, residual) for one in found(False)), "a missing wait was not caught"


@pytest.mark.parametrize(("kind", "kernel"), KINDS)
def test_who_waits_for_a_kernel_waits_for_all_in_front_of_it(rows: int, kind: str, kernel: str) -> None:
    """The writer, a kernel that has nothing to do with it, and one that reads what was written.

    With the wait of the one between taken out it was right too on an H200, in all cases: by this it cannot be told
    whether the device waits for those in front of a kernel before that counts as done, so nothing rests on it.
    """
    from ops.late_writer import write_late

    between, made = Kernel(kind, kernel, rows), Kernel("linear", "triton", rows)
    staged = made.x.clone()
    made(overlap=True)
    want = made.out.clone()

    def step() -> None:
        write_late(staged, made.x)
        between(overlap=True)
        made(overlap=True)

    assert all(right(one, want) for one in replays(step, lambda: made.x.fill_(float("nan")), lambda: made.out))


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_attention_waits_in_programs_without_work_too(rows: int, name: str) -> None:
    """A row of 5 tokens in a backend for 8192: most programs leave at once."""
    from ops.late_writer import write_late

    from stepgraph.ops.attention import AttentionShape, get_backend

    shape = AttentionShape(32, 8, 128)
    attention = get_backend(name, "cuda", shape, max_rows=rows, max_len=8192)
    kv = torch.zeros(rows + 1, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    q, tables = random(rows, 32, 128), torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")[:, None].contiguous()
    lengths, out = torch.full((rows,), 5, dtype=torch.int32, device="cuda"), torch.empty_like(q)
    made = Kernel("linear", "cuda", rows)
    staged = made.x.clone()
    made(overlap=True)
    want = made.out.clone()

    def step() -> None:
        write_late(staged, made.x)
        attention.decode(q, kv, tables, lengths, out)
        made(overlap=True)

    found = replays(step, lambda: made.x.fill_(float("nan")), lambda: made.out)
    assert all(right(one, want) for one in found)
