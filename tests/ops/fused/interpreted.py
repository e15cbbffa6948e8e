"""The kernels of the `fused` set under Triton's interpreter, on the CPU. Run by test_fused.py, not collected.

bfloat16 is left to the GPU: the interpreter multiplies its bits as integers.
"""

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from ops.fused.cases import OPERATIONS, Case, error
from ops.fused.strategies import cases
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.ops.fused.operation_set import FusedOperations
from stepgraph.ops.fused.tiling import ROWS, OneTile, Tile, Tiles
from stepgraph.ops.reference_set import ReferenceOperations

LENGTHS = [1, 16, 0, 17, 80, 0]
LAYERS = [  # lengths, heads, bias, norms of heads, tiles; head sizes of 12 and 10 are not powers of two
    ([80], (6, 2, 16), False, False, Tiles()),
    ([17], (4, 4, 12), False, True, Tiles()),
    (LENGTHS, (2, 1, 10), True, False, OneTile(Tile(16, 16, 1))),
    (LENGTHS, (4, 4, 12), False, True, OneTile(Tile(4, 64, 1))),
    (LENGTHS, (6, 2, 16), True, True, OneTile(None)),
    ([1 + 4 * row for row in range(18)], (6, 2, 16), False, False, Tiles()),
    ([1 + row for row in range(ROWS[-1] + 1)], (6, 2, 16), True, False, Tiles()),  # as the unfused set does it
]


def layers() -> None:
    for seed, (lengths, heads, bias, head_norms, tiles) in enumerate(LAYERS):
        case = make_case(lengths, heads=heads, bias=bias, head_norms=head_norms, seed=seed)
        before = case.kv_cache.clone()
        want, want_cache = run(ReferenceOperations(case.shape), case)
        got, cache = run(FusedOperations(case.shape, tiles, overlap=False), case)
        check_cache(cache, before, case)
        assert distance(got, want) < 1e-5, (seed, distance(got, want))
        assert distance(cache, want_cache) < 1e-5, seed


def adapters() -> None:
    many = [1 + 4 * row for row in range(18)]  # more than take a norm along
    for lengths, bias, head_norms, tiles in (
        (LENGTHS, False, False, Tiles()),
        (LENGTHS, True, True, OneTile(Tile(16, 16, 1))),
        ([80, 1], False, False, OneTile(None)),
        (many, True, False, OneTile(Tile(16, 64, 1))),
    ):
        case = make_case(lengths, bias=bias, head_norms=head_norms)
        lora = make_adapters(case)
        plain, _ = run(ReferenceOperations(case.shape), case)
        want, want_cache = run(ReferenceOperations(case.shape), case, lora)
        got, cache = run(FusedOperations(case.shape, tiles, overlap=False), case, lora)
        assert distance(got, want) < 1e-5 < distance(plain, want), (lengths, distance(got, want))
        assert distance(cache, want_cache) < 1e-5, lengths


def ranks() -> None:
    """Of two ranks each has half of what every output and down projection adds; here both are the same one."""
    for heads, tiles in (((6, 2, 16), Tiles()), ((4, 4, 12), OneTile(None))):
        case = make_case(LENGTHS, heads=heads)
        want, want_cache = run(ReferenceOperations(case.shape), case)
        halves = replace(case, layers=[
            replace(layer, attention_out=layer.attention_out / 2, down=layer.down / 2) for layer in case.layers
        ])  # fmt: skip
        shape = replace(case.shape, reduce=lambda x, residual: x * 2 + residual)
        got, cache = run(FusedOperations(shape, tiles, overlap=False), halves)
        assert distance(got, want) < 1e-5, (heads, distance(got, want))
        assert distance(cache, want_cache) < 1e-5, heads


def operations() -> None:
    for operation in OPERATIONS:

        @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=cases(operation, most_out=40, most_width=130))
        def right(case: Case) -> None:
            dtype = (torch.float32, torch.float16)[case.seed % 2]
            assert error(case, "cpu", dtype, overlap=False) < {torch.float32: 1e-5, torch.float16: 3e-3}[dtype], case

        right()


if __name__ == "__main__":
    torch.set_num_threads(1)
    layers()
    adapters()
    ranks()
    operations()
