"""Triton kernels of the runtime's GPU tests."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def add_one(x, size, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WAIT:
        gdc_wait()
    tl.store(x + place, tl.load(x + place, mask=place < size) + 1, mask=place < size)
