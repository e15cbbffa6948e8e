"""The kernels of the `fused` set under Triton's interpreter, on the CPU. Run by test_fused.py, not collected.

bfloat16 is left to the GPU: the interpreter multiplies its bits as integers.
"""

import torch
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.ops.fused import FusedOperations
from stepgraph.ops.fused.tiling import OPERATIONS, ROWS, Choice, Tile, Tiles
from stepgraph.ops.reference_set import ReferenceOperations

ROWS_OF_LENGTHS = [[80], [1, 16, 0, 17, 80, 0], [1 + 4 * row for row in range(18)]]
HEADS = [(6, 2, 16), (4, 4, 12), (2, 1, 10)]  # the last two are not powers of two


class Same(Tiles):
    """The same choice for every projection."""

    def __init__(self, tile: Tile | None) -> None:
        super().__init__()
        self._tile = tile

    def choose(self, operation: str, out: int, width: int, rows: int) -> Choice:
        return Choice(operation, out, width, rows, self._tile, "of a test")


def layers() -> None:
    tiles = [Tiles(), Same(Tile(16, 16, 1)), Same(Tile(4, 64, 1)), Same(None)]
    for seed, heads in enumerate(HEADS):
        for lengths, (bias, head_norms) in zip(ROWS_OF_LENGTHS, [(False, False), (True, False), (False, True)]):
            case = make_case(lengths, heads=heads, bias=bias, head_norms=head_norms, seed=seed)
            before = case.kv_cache.clone()
            want, want_cache = run(ReferenceOperations(case.shape), case)
            for choices in tiles:
                got, cache = run(FusedOperations(case.shape, choices, overlap=False), case)
                check_cache(cache, before, case)
                assert distance(got, want) < 1e-5, (heads, len(lengths), bias, head_norms, distance(got, want))
                assert distance(cache, want_cache) < 1e-5, (heads, len(lengths), bias, head_norms)


def adapters() -> None:
    case = make_case(ROWS_OF_LENGTHS[1])
    lora = make_adapters(case)
    plain, _ = run(ReferenceOperations(case.shape), case)
    want, want_cache = run(ReferenceOperations(case.shape), case, lora)
    got, cache = run(FusedOperations(case.shape, Tiles(), overlap=False), case, lora)
    assert distance(got, want) < 1e-5 < distance(plain, want), distance(got, want)
    assert distance(cache, want_cache) < 1e-5


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert {"qkv", "lm_head"} < set(OPERATIONS) and min(ROWS) == 1
    layers()
    adapters()
