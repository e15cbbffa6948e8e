"""Decode on a GPU, by Triton and by CUDA C++, against float64: no length is frozen, and nothing stale is read.

Every cache here holds NaN in block 0, in a block that nobody owns, in every unused slot and before every window.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from ops.captured import capture
from ops.oracle import Case, check, decode_lengths, expected, make_case, run_decode

from stepgraph.ops.attention.decode_plan import DecodeConfig
from stepgraph.runtime.errors import InputError
from stepgraph.runtime.support import AttentionCGSupport

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 1000, 2048, 4097, 8191, 8192, 0]
CONFIGS = {
    "default": DecodeConfig(),
    "ahead": DecodeConfig(num_stages=1, min_chunk=16, programs_per_sm=4),
    "pdl": DecodeConfig(pdl=True),
    "pdl ahead": DecodeConfig(pdl=True, num_stages=1, min_chunk=16),
}
BACKENDS = [*CONFIGS, "cuda"]


Maker = Callable[..., Any]
"""(case, name of a configuration or "cuda", max_rows) → a backend"""


@pytest.fixture
def make() -> Maker:
    pytest.importorskip("triton")
    from stepgraph.ops.attention.triton_backend import TritonAttention

    def make(case: Case, config: str = "default", max_rows: int = 64) -> TritonAttention:
        if config == "cuda":
            pytest.importorskip("cuda.bindings")
            from stepgraph.ops.attention.cuda_backend import CudaAttention

            return CudaAttention(case.shape, case.q.device, max_rows=max_rows, max_len=8192)
        chosen = CONFIGS[config]
        if chosen.pdl and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("programmatic dependent launch needs compute capability 9.0")
        return TritonAttention(case.shape, case.q.device, max_rows=max_rows, max_len=8192, config=chosen)

    return make


@cache
def mixed(dtype: torch.dtype, window: int | None = None) -> tuple[Case, torch.Tensor]:
    """All lengths in one batch, and what float64 makes of it."""
    lengths = list(EDGES)
    random.Random(window).shuffle(lengths)
    case = make_case(lengths, heads=(8, 2, 128), dtype=dtype, window=window)
    return case.to("cuda"), expected(case)


@cache
def growing(window: int | None) -> tuple[Case, dict[tuple[int, ...], torch.Tensor]]:
    """Three rows with room for 8192 tokens, and what float64 makes of some of their lengths."""
    case = replace(make_case([8192] * 3, heads=(8, 2, 128), dtype=torch.bfloat16), window=window)
    steps = [(1, 1, 0), (2, 17, 1), (128, 129, 15), (8192, 300, 16), (5000, 0, 8191), (8192, 8192, 8192)]
    wanted = {lengths: expected(replace(case, seq_lens=torch.tensor(lengths, dtype=torch.int32))) for lengths in steps}
    return case.to("cuda"), wanted


@cache
def stack() -> list[tuple[Case, torch.Tensor]]:
    """Four layers of the shape of an 8B model."""
    layers = [make_case([8192, 700, 0, 3000], heads=(32, 8, 128), dtype=torch.bfloat16, seed=i) for i in range(4)]
    return [(layer.to("cuda"), expected(layer)) for layer in layers]


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (dtype, config)
        for dtype in DTYPES
        for config in BACKENDS
        if dtype is torch.bfloat16 or config in ("default", "ahead", "cuda")
    ],
)
def test_decode_of_lengths_from_none_to_8192_in_one_batch(make: Maker, dtype: torch.dtype, config: str) -> None:
    case, want = mixed(dtype)
    backend = make(case, config)
    check(run_decode(backend, case), case, want)
    assert not backend.workspace.arrived.any()


def test_all_memory_of_a_backends_own_is_told_to_runners(make: Maker) -> None:
    case, _ = mixed(torch.bfloat16)
    triton, cuda = make(case), make(case, "cuda")
    assert set(triton.tensors()) == {f"workspace.{name}" for name in vars(triton.workspace)}
    own = {f"kernel.{name}" for name, held in vars(cuda.kernel).items() if isinstance(held, torch.Tensor)}
    assert len(own) == 3 and set(cuda.tensors()) == own | set(triton.tensors())
    assert all(tensor.is_cuda for tensor in cuda.tensors().values())


@pytest.mark.parametrize("config", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 17, 512, 8192])
def test_decode_of_a_single_row(make: Maker, length: int, config: str) -> None:
    case = make_case([length], heads=(32, 8, 128), dtype=torch.bfloat16).to("cuda")
    check(run_decode(make(case, config), case), case)


@pytest.mark.parametrize("heads", [(9, 3, 64), (20, 1, 80), (8, 8, 32), (4, 1, 256), (2, 2, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_of_other_head_counts_and_sizes(make: Maker, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = make_case([*decode_lengths(random.Random(2)), 2048], heads=heads, dtype=dtype).to("cuda")
    for config in ("default", "ahead"):
        check(run_decode(make(case, config), case), case)


@pytest.mark.parametrize("config", ["default", "ahead", "pdl ahead", "cuda"])
@pytest.mark.parametrize("window", [1, 16, 100, 4096, 100_000])
def test_decode_reads_no_token_before_the_window(make: Maker, window: int, config: str) -> None:
    for dtype in DTYPES:
        case, want = mixed(dtype, window)
        check(run_decode(make(case, config), case), case, want)


@pytest.mark.parametrize("config", ["default", "cuda"])
def test_decode_gives_the_same_bits_whoever_finishes_last(make: Maker, config: str) -> None:
    case, _ = mixed(torch.bfloat16)
    backend = make(case, config)
    first = run_decode(backend, case)
    for _ in range(200):
        assert torch.equal(run_decode(backend, case), first)


@pytest.mark.parametrize("config", ["default", "cuda"])
def test_a_longer_row_than_the_plan_was_made_for_comes_out_right(make: Maker, config: str) -> None:
    case = make_case([20_000, 3], heads=(8, 2, 64), dtype=torch.bfloat16).to("cuda")
    check(run_decode(make(case, config), case), case)


@pytest.mark.parametrize("heads", [(8, 1, 64), (14, 2, 64), (7, 1, 128), (3, 3, 128), (16, 2, 128), (40, 8, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_decode_of_other_groups_and_sizes(make: Maker, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = make_case([*decode_lengths(random.Random(3)), 2048], heads=heads, dtype=dtype).to("cuda")
    check(run_decode(make(case, "cuda"), case), case)


def test_cuda_decode_of_a_row_beyond_the_block_numbers_that_a_warp_holds(make: Maker) -> None:
    """A warp holds 32 block numbers at a time. In a batch that fills the device it gets some 80 of a row of 20,000."""
    case = make_case([20_000, *[3] * 66], heads=(8, 4, 64), dtype=torch.bfloat16).to("cuda")
    check(run_decode(make(case, "cuda", max_rows=67), case), case)


def test_more_rows_than_the_workspace_was_made_for_are_refused(make: Maker) -> None:
    case = make_case([5, 6, 7]).to("cuda")
    with pytest.raises(InputError, match="3 rows, but the workspace was made for 2; make the backend with a larger"):
        run_decode(make(case, max_rows=2), case)


@pytest.mark.parametrize("config", BACKENDS)
@pytest.mark.parametrize("window", [None, 300])
def test_one_capture_is_right_while_rows_grow_to_8192_and_back(make: Maker, config: str, window: int | None) -> None:
    case, wanted = growing(window)
    backend = make(case, config)
    assert backend.support >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    out = torch.empty_like(case.q)
    case.seq_lens.fill_(1)
    graph = capture(lambda: backend.decode(case.q, case.kv, case.block_tables, case.seq_lens, out))
    for lengths in (*wanted, *reversed(wanted)):
        case.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        check(out, case, wanted[lengths])


@pytest.mark.parametrize("config", BACKENDS)
def test_layers_that_follow_each_other_share_a_workspace(make: Maker, config: str) -> None:
    """Decodes directly behind each other in one graph: with PDL the next starts before the last has ended."""
    layers = stack()
    backend = make(layers[0][0], config)
    outs = [torch.empty_like(layer.q) for layer, _ in layers]

    def step() -> None:
        for (layer, _), out in zip(layers, outs, strict=True):
            backend.decode(layer.q, layer.kv, layer.block_tables, layer.seq_lens, out)

    graph = capture(step)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, (layer, want) in zip(outs, layers, strict=True):
            check(out, layer, want)


@pytest.mark.parametrize("config", ["pdl", "pdl ahead", "cuda"])
@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 128, 129, 1000, 8192])
def test_with_pdl_the_newest_token_may_come_from_a_kernel_that_ends_late(make: Maker, config: str, length: int) -> None:
    """The kernel in front lets decode start at once, and writes the queries and the newest keys and values last."""
    from ops.late_writer import write_late

    case = make_case([length], heads=(32, 8, 128), dtype=torch.bfloat16).to("cuda")
    backend = make(case, config)
    target = case.kv[int(case.block_tables[0, (length - 1) // 16]), :, (length - 1) % 16]
    staged_q, staged_kv, out = case.q.clone(), target.clone(), torch.empty_like(case.q)

    def step() -> None:
        write_late(staged_q, case.q)
        write_late(staged_kv, target)
        backend.decode(case.q, case.kv, case.block_tables, case.seq_lens, out)

    graph = capture(step)
    for _ in range(3):
        case.q.fill_(float("nan"))
        target.fill_(float("nan"))
        staged_q.neg_()
        staged_kv.neg_()
        graph.replay()
        check(out, case)
