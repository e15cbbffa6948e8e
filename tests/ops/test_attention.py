"""The attention contract: the torch reference, errors and selection. The Triton kernels: test_attention*_gpu.py."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from stepgraph.ops.attention import AttentionBackend, AttentionShape, available_backends, get_backend, select
from stepgraph.ops.attention.gather import PlanMemo, _group_by_length
from stepgraph.ops.attention.reference import ReferenceAttention
from stepgraph.runtime.errors import ConfigError, InputError
from stepgraph.runtime.platforms.tape import TapePlatform
from stepgraph.runtime.support import AttentionCGSupport

HEADS = [(9, 3, 64), (8, 8, 32), (4, 1, 128), (20, 1, 80)]
LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=8)


def backend_for(case: Case, name: str = "reference") -> AttentionBackend:
    return get_backend(name, case.q.device, case.shape)


def decode(case: Case) -> torch.Tensor:
    return run_decode(backend_for(case), case)


def prefill(case: Case) -> torch.Tensor:
    return run_prefill(backend_for(case), case)


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


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_reads_no_token_before_the_window(window: int, dtype: torch.dtype) -> None:
    """What lies before it is NaN in these caches, and its blocks are given back."""
    case = make_case(decode_lengths(random.Random(3)), window=window, dtype=dtype)
    check(decode(case), case)


def test_decode_gathers_the_windows_tokens_only() -> None:
    case = make_case([700, 30, 0, 200], window=40)
    plan = PlanMemo().get(case.kv, case.block_tables, case.seq_lens, merge=True, reach=(40,) * 4)
    assert [(chunk.num_rows, chunk.max_len) for chunk in plan.chunks] == [(3, 40)]


@pytest.mark.parametrize("window", [1, 15, 16, 40, 101, 5000])
def test_prefill_sees_no_further_back_than_the_window(window: int) -> None:
    case = make_case([1, 17, 40, 100, 0, 33], [1, 17, 8, 1, 0, 0], window=window, tail_tokens=3)
    check(prefill(case), case)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5), st.integers(1, 70))
@settings(max_examples=30, deadline=None)
def test_prefill_of_any_split_and_window(requests: list[tuple[int, int]], window: int) -> None:
    lengths, wanted = zip(*requests, strict=True)
    queries = [min(*pair) for pair in zip(lengths, wanted, strict=True)]
    case = make_case(lengths, queries, window=window)
    check(prefill(case), case)


def test_one_plan_is_not_used_for_another_window() -> None:
    case = make_case([40, 33, 60])
    for window in (None, 20, None, 7):
        shown = replace(case, window=window)
        check(decode(shown), shown)


def test_operators_are_declared_as_they_behave() -> None:
    case = make_case([17, 0, 5], [1, 0, 3])
    out = torch.zeros_like(case.q)
    args = (case.q, case.kv.nan_to_num(), case.block_tables, case.seq_lens)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.stepgraph.reference_prefill.default, (*args, case.query_start, out, 0.5, 4), test_utils=checks
    )
    rows = (args[0][:3], *args[1:], out[:3], 0.5, 4)
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


def test_a_tape_holds_prefill_as_one_record_and_replays_it_for_other_batches() -> None:
    """Also where slots without new tokens, or none at all, stand between the others."""
    held, *others = in_one_room(MIXED_BATCHES, tokens=48, requests=12)
    out = torch.empty_like(held.q)
    backend = backend_for(held)
    with torch.inference_mode():
        tape, _ = TapePlatform().record(
            lambda: backend.prefill(held.q, held.kv, held.block_tables, held.seq_lens, held.query_start, out), None
        )
    assert tape.num_nodes == 1
    for case in (*others, *reversed(others)):
        copy_into(held, case)
        out.zero_()
        tape.replay()
        check(out, case)


def test_prefill_leaves_padding_as_it_is() -> None:
    case = make_case([17, 40], [17, 3], tail_tokens=4)
    out = torch.full_like(case.q, 3.0)
    backend_for(case).prefill(case.q, case.kv, case.block_tables, case.seq_lens, case.query_start, out)
    assert (out[20:] == 3.0).all()


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


def test_a_window_holds_a_token() -> None:
    with pytest.raises(ConfigError, match="a window must hold at least 1 token, got 0"):
        AttentionShape(4, 2, 32, window=0)


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


def test_a_shape_that_the_cuda_kernel_cannot_take_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    monkeypatch.setattr(select.nvrtc, "available", lambda: True)
    assert available_backends("cuda") == ("cuda", "triton", "reference")
    with pytest.raises(ConfigError, match="heads of 64 or 128 in groups of up to 8.*use 'triton'"):
        get_backend("cuda", "cuda", AttentionShape(16, 1, 128))
    monkeypatch.setattr(select.nvrtc, "available", lambda: False)
    with pytest.raises(ConfigError, match="'cuda' needs the cuda-bindings package"):
        get_backend("cuda", "cuda", AttentionShape(8, 2, 128))


def test_a_gpu_cannot_capture_the_reference_and_a_tape_can() -> None:
    shape = AttentionShape(4, 2, 32)
    assert ReferenceAttention(shape, torch.device("cpu")).support is AttentionCGSupport.ALWAYS
    assert ReferenceAttention(shape, torch.device("cuda")).support is AttentionCGSupport.NEVER
    assert max(AttentionCGSupport) is AttentionCGSupport.ALWAYS
    assert AttentionCGSupport.UNIFORM_BATCH > AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE > AttentionCGSupport.NEVER
