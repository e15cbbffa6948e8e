"""The kernel of `advance` under Triton's interpreter, on the CPU. Run by test_advance.py, not collected."""

import random

import torch
from ops.advance_cases import BLOCK_SIZE, draw_case, expected

from stepgraph.ops.advance.triton_advance import advance_triton


def main() -> None:
    rng = random.Random(0)
    for rows in (1, 2, 13, 129):
        for _ in range(4):
            case = draw_case(rng, rows)
            want = expected(case)
            advance_triton(*case.values(), BLOCK_SIZE)
            for name, value in case.items():
                assert torch.equal(value, want[name]), (rows, name, value, want[name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
