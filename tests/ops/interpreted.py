"""The Triton kernels under Triton's interpreter, on the CPU. Run by test_triton_interpreted.py, not collected.

bfloat16 is left to the GPU: the interpreter multiplies its bits as integers.
"""

import random

import torch
import triton
import triton.language as tl
from ops.oracle import check, decode_lengths, make_case

from stepgraph.ops.attention.triton_decode import paged_decode
from stepgraph.ops.attention.triton_prefill import paged_prefill
from stepgraph.ops.sampling.philox import uniform_rows
from stepgraph.ops.sampling.reference import sample_reference
from stepgraph.ops.sampling.triton_sample import _uniform, sample_triton

DECODE = [((9, 3, 64), torch.float32), ((20, 1, 80), torch.float32), ((2, 2, 16), torch.float16)]
PREFILL = [((3, 1, 64), torch.float32), ((2, 1, 80), torch.float16)]


def decode() -> None:
    for seed, (heads, dtype) in enumerate(DECODE):
        case = make_case(decode_lengths(random.Random(seed)), heads=heads, dtype=dtype, seed=seed)
        out = torch.full_like(case.q, float("nan"))
        paged_decode(case.q, case.kv, case.block_tables, case.seq_lens, out, case.scale)
        check(out, case)


def prefill() -> None:
    lengths, queries = [1, 17, 40, 300, 0, 33, 65], [1, 17, 8, 150, 0, 0, 65]
    for seed, (heads, dtype) in enumerate(PREFILL):
        case = make_case(lengths, queries, heads=heads, dtype=dtype, seed=seed, tail_tokens=3)
        out = torch.zeros_like(case.q)
        tables = (case.block_tables, case.seq_lens, case.query_start)
        paged_prefill(case.q, case.kv, *tables, out, case.scale, max(queries))
        check(out, case)


@triton.jit
def store_uniforms(seed, position, out, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    u = _uniform(tl.load(seed), tl.load(position), start, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), u)


def uniforms() -> None:
    for seed, position, start in ((0, 0, 0), (-1, 2**33 + 5, 4096), (2**62 + 7, 2**31, 128), (-(2**63), -3, 64)):
        s, p, out = torch.tensor([seed]), torch.tensor([position]), torch.empty(64)
        store_uniforms[(1,)](s, p, out, start, BLOCK=64)
        assert torch.equal(out, uniform_rows(s, p, start + 64)[0, start:])


def sampling() -> None:
    noise = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.3, float("nan"), 2.0])
    top_k = torch.tensor([0, 0, 5, 0, 50, 3, 2, 10**6], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 0.1, 0.0])
    for index, vocab in enumerate([7, 50, 4096, 5000, 9001] * 2):
        logits = torch.randn(8, vocab, generator=noise) * 3
        if index % 3 == 0:
            logits = logits.round()  # ties, also at the edge of top-k
        if index % 4 == 0:
            logits = logits.bfloat16()
        if index % 5 == 0:
            logits[1], logits[2, 0], logits[3, 1:], logits[4, :5] = float("nan"), float("inf"), float("-inf"), -0.0
        seed = torch.randint(-(2**63), 2**63 - 1, (8,), generator=noise)
        position = torch.randint(0, 2**40, (8,), generator=noise)
        want, got = torch.full((8,), -1), torch.full((8,), -1)
        sample_reference(logits, temperature, top_k, top_p, seed, position, want)
        sample_triton(logits, temperature, top_k, top_p, seed, position, got)
        assert torch.equal(want, got), (vocab, index, want, got)


if __name__ == "__main__":
    torch.set_num_threads(1)
    decode()
    prefill()
    uniforms()
    sampling()
