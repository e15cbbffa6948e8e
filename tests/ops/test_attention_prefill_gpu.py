"""Triton prefill on a GPU against float64: a capture fixes the numbers of tokens and requests, and nothing else.

Every cache here holds NaN in block 0, in a block that nobody owns, in every unused slot and before every window, and so
do the queries past the last request's.
"""

import random

import pytest
import torch
from ops.captured import capture
from ops.oracle import Case, check, copy_into, in_one_room, make_case, mixed_batch, run_decode, run_prefill

from stepgraph.ops.attention import AttentionBackend, get_backend
from stepgraph.runtime.support import AttentionCGSupport

pytestmark = pytest.mark.gpu


def triton(case: Case) -> AttentionBackend:
    pytest.importorskip("triton")
    return get_backend("triton", "cuda", case.shape)


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 128), (4, 4, 80), (28, 4, 128), (16, 4, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 40, 100])
def test_prefill(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    lengths, queries = [1, 17, 40, 300, 0, 33, 129], [1, 17, 8, 200, 0, 0, 129]
    case = make_case(lengths, queries, heads=heads, dtype=dtype, tail_tokens=3, window=window).to("cuda")
    check(run_prefill(triton(case), case), case)


def test_captured_prefill_is_right_for_a_uniform_batch() -> None:
    """Speculative verification: every request has four new tokens, whatever its length."""
    case = make_case([300, 65, 4, 17], [4, 4, 4, 4], heads=(9, 3, 64)).to("cuda")
    backend = triton(case)
    assert backend.support is AttentionCGSupport.ALWAYS
    out = torch.empty_like(case.q)
    graph = capture(lambda: backend.prefill(case.q, case.kv, case.block_tables, case.seq_lens, case.query_start, out))
    for lengths in ([4, 4, 4, 4], [300, 65, 4, 17], [64, 33, 4, 5]):
        case.seq_lens.copy_(torch.tensor(lengths))
        out.zero_()
        graph.replay()
        check(out, case)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((32, 8, 128), torch.bfloat16),
        ((9, 3, 64), torch.bfloat16),
        ((8, 8, 64), torch.float16),
        ((28, 4, 128), torch.float16),
        ((8, 1, 80), torch.bfloat16),
        ((6, 2, 32), torch.float32),
    ],
)
@pytest.mark.parametrize(("tokens", "requests"), [(16, 16), (128, 40), (640, 64)])
@pytest.mark.parametrize("window", [None, 100])
def test_one_captured_prefill_is_right_for_any_mix(
    heads: tuple[int, int, int], dtype: torch.dtype, tokens: int, requests: int, window: int | None
) -> None:
    """Lengths, how many tokens each request brings, tables, cache and the live boundary change between replays."""
    rng = random.Random(tokens)
    batches = [mixed_batch(rng, tokens=tokens, requests=requests, longest=1000) for _ in range(4)]
    batches += [([tokens], [tokens]), ([], []), ([3000, 1, 700, 2000], [1] * 4)]
    sizes = {"tokens": tokens, "requests": requests, "heads": heads, "dtype": dtype, "window": window}
    cases = in_one_room(batches, **sizes)
    held = cases[0].to("cuda")
    backend = triton(held)
    out = torch.empty_like(held.q)
    graph = capture(lambda: backend.prefill(held.q, held.kv, held.block_tables, held.seq_lens, held.query_start, out))
    for case in (*cases, cases[0]):
        copy_into(held, case)
        out.zero_()
        graph.replay()
        check(out, case)


def test_one_captured_token_is_right_for_any_length() -> None:
    cases = in_one_room([([length], [1]) for length in (8192, 1, 512, 17)], tokens=1, requests=1)
    held = cases[0].to("cuda")
    backend = triton(held)
    out = torch.empty_like(held.q)
    graph = capture(lambda: backend.prefill(held.q, held.kv, held.block_tables, held.seq_lens, held.query_start, out))
    for case in cases:
        copy_into(held, case)
        graph.replay()
        check(out, case)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_both_backends_run_eagerly(name: str) -> None:
    for window in (None, 30):
        case = make_case([40, 0, 17, 300], heads=(9, 3, 64), window=window).to("cuda")
        check(run_decode(get_backend(name, "cuda", case.shape), case), case)
        case = make_case([40, 17, 300], [3, 17, 70], heads=(9, 3, 64), window=window).to("cuda")
        check(run_prefill(get_backend(name, "cuda", case.shape), case), case)
