"""The attention contract: the torch reference everywhere, the Triton kernels where there is a GPU."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.oracle import Case, check, decode_lengths, make_case

from stepgraph.ops.attention import AttentionBackend, AttentionShape, available_backends, get_backend, select
from stepgraph.ops.attention.gather import _group_by_length
from stepgraph.ops.attention.reference import ReferenceAttention
from stepgraph.runtime.errors import ConfigError, InputError
from stepgraph.runtime.platforms.tape import TapePlatform
from stepgraph.runtime.support import AttentionCGSupport

HEADS = [(9, 3, 64), (8, 8, 32), (4, 1, 128), (20, 1, 80)]
LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=8)


def shape_of(case: Case) -> AttentionShape:
    return AttentionShape(case.q.shape[1], case.kv.shape[3], case.q.shape[2], case.kv.shape[2])


def backend_for(case: Case, name: str = "reference") -> AttentionBackend:
    return get_backend(name, case.q.device, shape_of(case))


def decode(case: Case, name: str = "reference") -> torch.Tensor:
    out = torch.full_like(case.q, float("nan"))
    backend_for(case, name).decode(case.q, case.kv, case.block_tables, case.seq_lens, out)
    return out


def prefill(case: Case, name: str = "reference", *, max_query_len: int | None = None) -> torch.Tensor:
    """Tokens past the last request's start out as 0, which is what the oracle says of them."""
    out = torch.zeros_like(case.q)
    longest = int(case.query_start.diff().max()) if max_query_len is None else max_query_len
    backend_for(case, name).prefill(
        case.q, case.kv, case.block_tables, case.seq_lens, case.query_start, out, max_query_len=longest
    )
    return out


# --- the reference


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_decode_equals_attention_in_float64(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = make_case(decode_lengths(random.Random(1)), heads=heads, dtype=dtype)
    check(decode(case), case)


@given(LENGTHS, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_decode_of_any_lengths_reads_nothing_stale(lengths: list[int], seed: int) -> None:
    case = make_case(lengths, seed=seed)
    check(decode(case), case)


def test_decode_of_lengths_too_different_to_share_a_chunk() -> None:
    case = make_case([30, 2048, 0, 700, 40, 1, 1999, 650], heads=(9, 3, 64))
    check(decode(case), case)


def test_rows_do_not_depend_on_the_padding_behind_them() -> None:
    case = make_case([40, 17, 90, 0, 0])
    alone = Case(case.q[:3], case.kv, case.block_tables[:3], case.seq_lens[:3], case.query_start[:4])
    assert torch.equal(decode(case)[:3], decode(alone))


@given(st.lists(st.integers(1, 5000), max_size=40), st.sampled_from([96, 1536, 8192]))
def test_chunks_hold_every_row_once(lengths: list[int], token_bytes: int) -> None:
    groups = _group_by_length(list(range(len(lengths))), lengths, token_bytes)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(group == sorted(group) and group for group in groups)


def test_changes_in_place_are_seen() -> None:
    """The plan of the last call is kept; lengths, tables, queries and cache may all change under it."""
    case = make_case([40, 33, 60])
    check(decode(case), case)
    case.seq_lens.copy_(torch.tensor([39, 0, 50]))
    check(decode(case), case)
    case.block_tables.copy_(case.block_tables.flip(0))
    case.seq_lens.copy_(torch.tensor([60, 33, 40]))
    check(decode(case), case)
    case.kv.mul_(-2)
    case.q.neg_()
    check(decode(case), case)


def test_one_plan_is_not_used_for_another_cache_layout() -> None:
    case = make_case([40, 33, 60])
    decode(case)
    dense = Case(case.q, case.kv.clone(), case.block_tables, case.seq_lens, case.query_start)
    assert dense.kv.stride() != case.kv.stride()
    check(decode(dense), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_of_whole_prompts_chunks_and_single_tokens(dtype: torch.dtype) -> None:
    case = make_case([1, 17, 40, 100, 0, 33], [1, 17, 8, 1, 0, 0], dtype=dtype, tail_tokens=3)
    check(prefill(case), case)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_prefill_of_any_split(requests: list[tuple[int, int]], seed: int) -> None:
    lengths, wanted = zip(*requests, strict=True)
    case = make_case(lengths, [min(*pair) for pair in zip(lengths, wanted, strict=True)], seed=seed)
    check(prefill(case), case)


def test_operators_are_declared_as_they_behave() -> None:
    case = make_case([17, 0, 5], [1, 0, 3])
    out = torch.zeros_like(case.q)
    args = (case.q, case.kv.nan_to_num(), case.block_tables, case.seq_lens)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.stepgraph.reference_prefill.default, (*args, case.query_start, out, 0.5), test_utils=checks
    )
    rows = (args[0][:3], *args[1:], out[:3], 0.5)
    torch.library.opcheck(torch.ops.stepgraph.reference_decode.default, rows, test_utils=checks)


def test_a_tape_holds_decode_as_one_record_and_replays_it_for_new_lengths() -> None:
    case = make_case([40, 33, 60, 0])
    out = torch.empty_like(case.q)
    backend = backend_for(case)
    with torch.inference_mode():
        tape, _ = TapePlatform().record(
            lambda: backend.decode(case.q, case.kv, case.block_tables, case.seq_lens, out), None
        )
    assert tape.num_nodes == 1
    for lengths in ([1, 0, 59, 0], [40, 33, 60, 0]):
        case.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        tape.replay()
        check(out, case)


# --- errors and selection


def test_a_length_beyond_the_block_table_names_the_row() -> None:
    case = make_case([5, 20])
    case.seq_lens[1] = 65
    with pytest.raises(InputError, match="row 1 has 65 tokens, but its block table has room for 64"):
        decode(case)


def test_a_cache_strided_within_a_block_is_refused() -> None:
    case = make_case([5])
    moved = case.kv.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(InputError, match="contiguous within a block"):
        decode(Case(case.q, moved, case.block_tables, case.seq_lens, case.query_start))


def test_head_counts_must_divide() -> None:
    with pytest.raises(ConfigError, match="9 query heads cannot share 2 KV heads evenly"):
        AttentionShape(9, 2, 64)


def test_selection_names_what_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 2, 32)
    assert get_backend(None, "cpu", shape).name == "reference"
    with pytest.raises(ConfigError, match="unknown backend 'flash'; available on cpu: reference"):
        get_backend("flash", "cpu", shape)
    with pytest.raises(ConfigError, match="'triton' runs on cuda, not on cpu; available on cpu: reference"):
        get_backend("triton", "cpu", shape)
    with pytest.raises(ConfigError, match="no backend runs on device 'meta'"):
        get_backend(None, "meta", shape)
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert available_backends("cuda") == ("reference",)
    with pytest.raises(ConfigError, match="needs the triton package"):
        get_backend("triton", "cuda", shape)


def test_a_gpu_cannot_capture_the_reference_and_a_tape_can() -> None:
    shape = AttentionShape(4, 2, 32)
    assert ReferenceAttention(shape, torch.device("cpu")).support is AttentionCGSupport.ALWAYS
    assert ReferenceAttention(shape, torch.device("cuda")).support is AttentionCGSupport.NEVER
    assert max(AttentionCGSupport) is AttentionCGSupport.ALWAYS
    assert AttentionCGSupport.UNIFORM_BATCH > AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE > AttentionCGSupport.NEVER


# --- on a GPU

GPU_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(9, 3, 64), (20, 1, 80), (8, 1, 128)])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_triton_decode_equals_attention_in_float64(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = make_case([*decode_lengths(random.Random(2)), 2048], heads=heads, dtype=dtype).to(device)
    check(decode(case, "triton"), case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 128)])
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_triton_prefill_equals_attention_in_float64(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    lengths, queries = [1, 17, 40, 300, 0, 33, 129], [1, 17, 8, 200, 0, 0, 129]
    case = make_case(lengths, queries, heads=heads, dtype=dtype, tail_tokens=3).to(device)
    check(prefill(case, "triton"), case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_both_backends_run_eagerly_on_a_gpu(device: torch.device, name: str) -> None:
    case = make_case([40, 0, 17, 300], heads=(9, 3, 64)).to(device)
    check(decode(case, name), case)
    case = make_case([40, 17, 300], [3, 17, 70], heads=(9, 3, 64)).to(device)
    check(prefill(case, name), case)


@pytest.mark.gpu
def test_captured_triton_decode_is_right_for_other_lengths(device: torch.device) -> None:
    """Captured with short rows, replayed with longer ones: no context size is frozen in the graph."""
    case = make_case([300, 65, 2048, 17], heads=(9, 3, 64), dtype=torch.bfloat16).to(device)
    full = case.seq_lens.clone()
    backend = backend_for(case, "triton")
    assert backend.support >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    out = torch.empty_like(case.q)

    def step() -> None:
        backend.decode(case.q, case.kv, case.block_tables, case.seq_lens, out)

    case.seq_lens.fill_(1)
    graph = capture(step)
    for lengths in ([1, 1, 1, 1], [300, 65, 2048, 17], [0, 64, 1000, 0], [16, 0, 15, 17]):
        case.seq_lens.copy_(torch.minimum(torch.tensor(lengths, device=device), full))
        case.q.neg_()
        out.fill_(float("nan"))
        graph.replay()
        check(out, case)


@pytest.mark.gpu
def test_captured_triton_prefill_is_right_for_a_uniform_batch(device: torch.device) -> None:
    """Speculative verification: every request has four new tokens, whatever its length."""
    case = make_case([300, 65, 4, 17], [4, 4, 4, 4], heads=(9, 3, 64)).to(device)
    backend = backend_for(case, "triton")
    assert backend.support is AttentionCGSupport.UNIFORM_BATCH
    out = torch.empty_like(case.q)

    def step() -> None:
        backend.prefill(case.q, case.kv, case.block_tables, case.seq_lens, case.query_start, out, max_query_len=4)

    graph = capture(step)
    for lengths in ([4, 4, 4, 4], [300, 65, 4, 17], [64, 33, 4, 5]):
        case.seq_lens.copy_(torch.tensor(lengths))
        out.zero_()
        graph.replay()
        check(out, case)


def capture(step) -> torch.cuda.CUDAGraph:  # type: ignore[no-untyped-def]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles the kernel, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
