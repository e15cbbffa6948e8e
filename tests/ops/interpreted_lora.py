"""The adapters' kernels under Triton's interpreter, on the CPU. Run by test_lora.py, not collected."""

from dataclasses import replace

import torch
from ops.layers import distance
from ops.lora_cases import LoraCase, lora_case

from stepgraph.ops.lora.triton_lora import TritonLora

SHAPES = [  # rows, columns in, ends of the parts, active adapters, rank
    (1, 40, (48,), 1, 16),
    (13, 2100, (600, 680, 700), 3, 16),
    (16, 72, (300, 700), 4, 64),
    (5, 64, (512,), 4, 32),
    (3, 32, (4100, 8300), 2, 16),
    (17, 1100, (300, 380, 400), 3, 16),
    (70, 200, (256, 600), 4, 32),
]


def check(case: LoraCase, bound: float) -> None:
    out = case.out.clone()
    TritonLora(case.rows)(case.pair, case.x, out, case.norm)
    assert distance(out, case.want()) < bound, (out.dtype, out.shape, distance(out, case.want()))
    none = (case.rows.index < 0) | (case.rows.index >= case.rows.active)
    assert torch.equal(out[none], case.out[none])


def main() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        for seed, (rows, width, ends, active, rank) in enumerate(SHAPES):
            for norm in (False, True):
                case = lora_case(
                    rows=rows, width=width, ends=ends, active=active, norm=norm, rank=rank, dtype=dtype, seed=seed
                )
                check(case, bound)
                # A number beyond those there may be gets nothing.
                check(replace(case, rows=replace(case.rows, active=max(active - 1, 1))), bound)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
