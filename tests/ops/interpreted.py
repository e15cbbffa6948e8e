"""The Triton kernels under Triton's interpreter, on the CPU. Run by test_triton_interpreted.py, not collected.

bfloat16 is left to the GPU: the interpreter multiplies its bits as integers.
"""

import random
from dataclasses import replace

import torch
import triton
import triton.language as tl
from ops.oracle import (
    MIXED_BATCHES,
    Case,
    check,
    copy_into,
    decode_lengths,
    in_one_room,
    make_case,
    run_decode,
    run_prefill,
)
from ops.sampling_cases import sampling_case

from stepgraph.ops.attention.decode_plan import DecodeConfig
from stepgraph.ops.attention.triton_backend import TritonAttention
from stepgraph.ops.attention.triton_prefill import tile_rows
from stepgraph.ops.sampling.philox import uniform_rows
from stepgraph.ops.sampling.triton_chain import chain_triton
from stepgraph.ops.sampling.triton_rows import uniform_from
from stepgraph.ops.sampling.triton_sample import SamplePlan

CPU = torch.device("cpu")
SMALL = DecodeConfig(tile_bytes=4096, num_stages=3, programs_per_sm=1, min_chunk=16)
AHEAD = replace(SMALL, num_stages=1)
DECODE = [  # heads, dtype, config, programs for each of ten rows and a KV head, window
    ((9, 3, 64), torch.float32, SMALL, 1, None),
    ((9, 3, 64), torch.float32, SMALL, 5, 70),
    ((20, 1, 80), torch.float32, AHEAD, 7, None),
    ((2, 2, 16), torch.float16, AHEAD, 3, 40),
    ((4, 2, 32), torch.float16, replace(AHEAD, min_chunk=48), 6, None),
]
PREFILL = [  # heads, dtype, rows of a program, multiprocessors that lead to them, window
    ((3, 1, 64), torch.float32, 32, 1, None),
    ((8, 2, 80), torch.float16, 16, 1000, None),
    ((7, 1, 128), torch.float16, 128, 1, 20),
    ((8, 1, 64), torch.float32, 32, 50, 100),
    ((2, 2, 64), torch.float16, 16, 1000, 40),
    ((20, 1, 16), torch.float16, 32, 1000, None),
]


def attention(case: Case, config: DecodeConfig, num_sms: int) -> TritonAttention:
    return TritonAttention(case.shape, CPU, max_rows=10, max_len=320, config=config, num_sms=num_sms)


def decode() -> None:
    for seed, (heads, dtype, config, splits, window) in enumerate(DECODE):
        case = make_case(decode_lengths(random.Random(seed)), heads=heads, dtype=dtype, seed=seed, window=window)
        backend = attention(case, config, 10 * heads[1] * splits)
        assert backend.decode_plan.splits(10) == splits
        assert set(map(id, backend.tensors().values())) == set(map(id, vars(backend.workspace).values()))
        check(run_decode(backend, case), case)
        assert not backend.workspace.arrived.any()


def decode_as_a_row_grows() -> None:
    """One workspace, and rows that are cut into one to seven parts."""
    case = make_case([200, 200], heads=(4, 2, 32))
    cases = (case, replace(case, window=50))
    backends = [attention(case, SMALL, 28) for case in cases]
    assert [backend.decode_plan.splits(2) for backend in backends] == [7, 4]
    for lengths in ([1, 200], [16, 17], [33, 0], [112, 113], [200, 90], [1, 1]):
        case.seq_lens.copy_(torch.tensor(lengths))
        for shown, backend in zip(cases, backends, strict=True):
            check(run_decode(backend, shown), shown)
            assert not backend.workspace.arrived.any()


def prefill() -> None:
    lengths, queries = [0, 1, 15, 16, 17, 40, 150, 33, 0, 65, 0], [0, 1, 15, 16, 1, 8, 17, 0, 0, 65, 0]
    for seed, (heads, dtype, rows, num_sms, window) in enumerate(PREFILL):
        case = make_case(lengths, queries, heads=heads, dtype=dtype, seed=seed, tail_tokens=3, window=window)
        assert tile_rows(len(case.q), case.shape, case.q.element_size(), num_sms) == rows
        check(run_prefill(attention(case, SMALL, num_sms), case), case)


def prefill_as_the_batch_changes() -> None:
    """The launch is the same for all; everything else changes in place."""
    for heads, window, num_sms in (((6, 2, 32), None, 1), ((4, 1, 24), 33, 1000)):
        held, *others = in_one_room(MIXED_BATCHES, tokens=48, requests=12, heads=heads, window=window)
        backend = attention(held, SMALL, num_sms)
        check(run_prefill(backend, held), held)
        for case in others:
            copy_into(held, case)
            check(run_prefill(backend, held), case)


def prefill_of_few_among_many_slots() -> None:
    queries = [4 * (slot % 30 == 29) for slot in range(300)]
    case = make_case([5 * query for query in queries], queries, heads=(2, 1, 16), tail_tokens=1)
    check(run_prefill(attention(case, SMALL, 1000), case), case)


def prefill_of_one_token() -> None:
    for length, tail in ((0, 1), (1, 0), (17, 0), (300, 0)):
        case = make_case([length], [1 - tail], heads=(4, 2, 32), tail_tokens=tail)
        check(run_prefill(attention(case, SMALL, 28), case), case)


@triton.jit
def store_uniforms(seed, position, out, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    u = uniform_from(tl.load(seed), tl.load(position), start, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), u)


def uniforms() -> None:
    for seed, position, start in ((0, 0, 0), (-1, 2**33 + 5, 4096), (2**62 + 7, 2**31, 128), (-(2**63), -3, 64)):
        s, p, out = torch.tensor([seed]), torch.tensor([position]), torch.empty(64)
        store_uniforms[(1,)](s, p, out, start, BLOCK=64)
        assert torch.equal(out, uniform_rows(s, p, start + 64)[0, start:])


def sampling() -> None:
    """Small blocks share a row between many programs; a list without room is settled by the whole row."""
    small = SamplePlan(block=128, bins=128, room=128, programs=10**6)
    plans = [SamplePlan(), small, replace(small, room=4), replace(small, programs=30), replace(small, bins=16, room=16)]
    for number, vocab in [(0, 7), (1, 500), (2, 300), (3, 1001), (4, 640), (6, 700), (10, 129)]:
        case = sampling_case(number, rows=12, vocab=vocab)
        want, seen = case.reference()
        for got in (case.triton(plans[number % len(plans)]), case.run(chain_triton, block=512)):
            assert torch.equal(got[0], want), (number, want, got[0])
            assert torch.equal(got[1], seen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    decode()
    decode_as_a_row_grows()
    prefill()
    prefill_as_the_batch_changes()
    prefill_of_few_among_many_slots()
    prefill_of_one_token()
    uniforms()
    sampling()
