"""The kernels of the `unfused` set under Triton's interpreter, on the CPU. Run by test_unfused.py, not collected."""

import torch
from ops.layers import check_cache, distance, make_adapters, make_case, run

from stepgraph.ops.reference_set import ReferenceOperations
from stepgraph.ops.unfused import UnfusedOperations

LENGTHS = [1, 16, 0, 17, 80, 0]
HEADS = [(6, 2, 16), (4, 4, 12), (2, 1, 10)]  # the last two are not powers of two


def main() -> None:
    for seed, heads in enumerate(HEADS):
        for bias, head_norms in ((False, False), (True, False), (False, True)):
            case = make_case(LENGTHS, heads=heads, bias=bias, head_norms=head_norms, seed=seed)
            before = case.kv_cache.clone()
            want, want_cache = run(ReferenceOperations(case.shape), case)
            got, cache = run(UnfusedOperations(case.shape), case)
            check_cache(cache, before, case)
            assert distance(got, want) < 1e-5, (heads, bias, head_norms, distance(got, want))
            assert distance(cache, want_cache) < 1e-5, (heads, bias, head_norms)
        adapters = make_adapters(case, seed)
        adapted, adapted_cache = run(ReferenceOperations(case.shape), case, adapters)
        got, cache = run(UnfusedOperations(case.shape), case, adapters)
        assert distance(got, adapted) < 1e-5 < distance(adapted, want), (heads, distance(got, adapted))
        assert distance(cache, adapted_cache) < 1e-5, heads


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
