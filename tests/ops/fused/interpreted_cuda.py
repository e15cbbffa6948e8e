"""Layers by the CUDA C++ projections, emulated, and the rest under Triton's interpreter. Run by test_fused.py."""

import tempfile
from pathlib import Path

import torch
from ops.fused.emulator import EmulatedKernel
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.ops import nvrtc
from stepgraph.ops.fused import cuda_projection
from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import OneTile, Tile
from stepgraph.ops.reference_set import ReferenceOperations

LENGTHS = [1, 16, 0, 17, 80, 0]


def main(folder: Path) -> None:
    modes: set[int] = set()

    def make(source: str, name: str, defines: dict[str, int]) -> EmulatedKernel:
        modes.add(defines["MODE"])
        return EmulatedKernel(folder, defines, late=True, hide="x")

    cuda_projection.CudaKernel = make  # type: ignore[assignment, misc]
    nvrtc.available = lambda: True  # type: ignore[assignment]
    for lengths, bias, head_norms, adapters in (
        (LENGTHS, True, False, False),
        ([80], False, True, False),
        (LENGTHS, True, False, True),
    ):
        case = make_case(lengths, heads=(8, 2, 64), bias=bias, head_norms=head_norms, sizes=(128, 192))
        truth, truth_cache = run(ReferenceOperations(case.shape), case, make_adapters(case) if adapters else None)
        half = case.to("cpu", torch.float16)
        lora = make_adapters(half) if adapters else None
        reference, reference_cache = run(ReferenceOperations(half.shape), half, lora)
        tiles = OneTile(Tile(16, 64, 2, 2, "cuda"))
        got, cache = run(FusedOperations(half.shape, tiles, overlap=False), half, lora)
        check_cache(cache, half.kv_cache, half)
        assert distance(got, truth) <= 2 * distance(reference, truth)
        assert distance(cache, truth_cache) <= 2 * distance(reference_cache, truth_cache)
    assert modes == {0, 1, 2, 3}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
