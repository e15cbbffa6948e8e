"""Every rule that changes a configuration, what it leaves behind, and what is refused."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime import Backend, ConfigError, GraphConfig, Ladder
from stepgraph.runtime.config import Debug, DecodePhase, PrefillPhase
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.resolve import AttentionGroup, Change, Resolution, Severity, resolve
from stepgraph.runtime.support import AttentionCGSupport as Support

FULL, BREAKABLE, DISABLED = Backend.FULL, Backend.BREAKABLE, Backend.DISABLED
ROWS, TOKENS = Ladder.vllm(16), Ladder.explicit([16, 64])


def config(decode: Backend = FULL, prefill: Backend = FULL, query_lens: tuple[int, ...] = (1,)) -> GraphConfig:
    return GraphConfig(DecodePhase(decode, ROWS, query_lens), PrefillPhase(prefill, TOKENS))


def resolved(asked: GraphConfig, *groups: AttentionGroup, strict: bool = False) -> Resolution:
    return resolve(asked, groups, max_requests=16, max_tokens=64, strict=strict)


def only(resolution: Resolution) -> Change:
    (change,) = resolution.changes
    return change


@pytest.mark.parametrize("groups", [(), (AttentionGroup("triton", Support.ALWAYS),)])
def test_what_works_is_left_as_it_is(groups: tuple[AttentionGroup, ...]) -> None:
    assert resolved(config(query_lens=(1, 4)), *groups, strict=True) == Resolution(config(query_lens=(1, 4)), ())


@pytest.mark.parametrize(("decode", "prefill"), [(FULL, DISABLED), (DISABLED, FULL), (FULL, FULL)])
def test_full_with_never_raises_and_names_the_backend(decode: Backend, prefill: Backend) -> None:
    with pytest.raises(ConfigError, match=r"attention backend torch \(NEVER\) cannot be recorded; ask for breakable"):
        resolved(config(decode, prefill), AttentionGroup("triton", Support.ALWAYS), AttentionGroup("torch", Support(0)))


@pytest.mark.parametrize("level", Support)
def test_breakable_works_with_every_level(level: Support) -> None:
    asked = config(BREAKABLE, BREAKABLE, (1, 4))
    assert resolved(asked, AttentionGroup("any", level, max_query_len=1), strict=True) == Resolution(asked, ())


@pytest.mark.parametrize("level", [Support.UNIFORM_SINGLE_TOKEN_DECODE, Support.UNIFORM_BATCH])
def test_full_prefill_needs_always(level: Support) -> None:
    resolution = resolved(config(), AttentionGroup("flash", level))
    change = only(resolution)
    assert resolution.config == config(FULL, BREAKABLE)
    assert (change.where, change.before, change.after) == ("prefill.backend", "full", "breakable")
    assert (change.rule, change.severity) == ("full-prefill-needs-always", Severity.WARNING)
    assert f"attention backend flash ({level.name})" in change.reason and "BREAKABLE" in change.reason


def test_full_prefill_needs_a_bound_as_long_as_a_prompt() -> None:
    resolution = resolved(config(), AttentionGroup("flash", Support.ALWAYS, max_query_len=63))
    assert only(resolution).rule == "full-prefill-query-bound"
    assert resolution.config.prefill.backend is BREAKABLE
    assert not resolved(config(), AttentionGroup("flash", Support.ALWAYS, max_query_len=64)).changes


def test_a_query_length_above_one_needs_uniform_batches() -> None:
    single = AttentionGroup("flash", Support.UNIFORM_SINGLE_TOKEN_DECODE)
    resolution = resolved(config(FULL, BREAKABLE, (1, 4)), single)
    change = only(resolution)
    assert resolution.config.decode.query_lens == (1,)
    assert (change.where, change.after) == ("decode.query_lens[4]", "no keys")
    assert (change.rule, change.severity) == ("query-length-needs-uniform-batch", Severity.WARNING)
    assert "flash (UNIFORM_SINGLE_TOKEN_DECODE)" in change.reason and "relaxed key" in change.reason
    assert "run eagerly" in only(resolved(config(FULL, DISABLED, (1, 4)), single)).reason
    assert not resolved(config(FULL, DISABLED, (1, 4)), AttentionGroup("flash", Support.UNIFORM_BATCH)).changes


def test_the_lowest_bound_of_all_groups_counts() -> None:
    groups = [AttentionGroup("wide", Support.UNIFORM_BATCH, 8), AttentionGroup("narrow", Support.UNIFORM_BATCH, 3)]
    resolution = resolved(config(FULL, DISABLED, (1, 2, 4, 9)), *groups)
    assert resolution.config.decode.query_lens == (1, 2)
    assert {change.rule for change in resolution.changes} == {"query-length-bound"}
    assert all("narrow replays at most 3" in change.reason for change in resolution.changes)


def test_the_phase_is_disabled_with_its_last_query_length() -> None:
    resolution = resolved(config(FULL, BREAKABLE, (4,)), AttentionGroup("flash", Support(1)))
    assert resolution.config.decode == DecodePhase(query_lens=(4,))


def test_a_query_length_that_fits_no_step_is_left_out() -> None:
    resolution = resolved(config(BREAKABLE, DISABLED, (1, 65)))
    assert only(resolution).rule == "query-length-fits-step" and resolution.config.decode.query_lens == (1,)


def test_ladders_and_slots_are_cut_to_the_buffers() -> None:
    asked = GraphConfig(
        DecodePhase(FULL, Ladder.vllm(512), (1, 4)), PrefillPhase(FULL, Ladder.sglang_prefill(2048), max_requests=64)
    )
    resolution = resolve(asked, (), max_requests=20, max_tokens=40, strict=True)
    wheres = [change.where for change in resolution.changes]
    assert wheres == ["decode.ladder", "decode.ladder[query length 4]", "prefill.ladder", "prefill.max_requests"]
    assert {change.severity for change in resolution.changes} == {Severity.INFO}
    assert resolution.config.decode.ladder == Ladder.vllm(512).upto(20)
    assert resolution.config.prefill.ladder == Ladder.sglang_prefill(2048).upto(40)
    assert resolution.config.prefill.max_requests == 20


@pytest.mark.parametrize("debug", [Debug.EAGER_THROUGH_GRAPH, Debug.BREAK_EVERY_OP])
def test_a_debug_mode_of_breaks_captures_no_full_graph(debug: Debug) -> None:
    asked = GraphConfig(DecodePhase(FULL, ROWS), PrefillPhase(DISABLED), debug=debug)
    resolution = resolved(asked, AttentionGroup("torch", Support.NEVER), strict=True)
    assert resolution.config.decode.backend is BREAKABLE and only(resolution).rule == "debug-breaks"


def test_strict_makes_every_downgrade_an_error_and_names_them_all() -> None:
    asked = config(FULL, FULL, (1, 4))
    assert len(resolved(asked, AttentionGroup("flash", Support(1))).changes) == 2
    with pytest.raises(ConfigError, match=r"full-prefill-needs-always.*query-length-needs-uniform-batch"):
        resolved(asked, AttentionGroup("flash", Support(1)), strict=True)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 4), (8, 4)])
def test_limits_that_cannot_be(rows: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="limits"):
        resolve(GraphConfig(), (), max_requests=rows, max_tokens=tokens)


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention flash: max_query_len 0"):
        AttentionGroup("flash", Support.ALWAYS, 0)


groups = st.lists(
    st.builds(AttentionGroup, st.sampled_from("ab"), st.sampled_from(Support), st.none() | st.integers(1, 99)),
    max_size=3,
)
ladders = st.builds(Ladder.explicit, st.sets(st.integers(1, 99), min_size=1, max_size=4))
query_lens = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True).map(tuple)
configs = st.builds(
    GraphConfig,
    st.builds(DecodePhase, st.sampled_from(Backend), ladders, query_lens),
    st.builds(PrefillPhase, st.sampled_from(Backend), ladders, st.none() | st.integers(1, 40)),
    debug=st.sampled_from(Debug),
)


@given(configs, groups, st.integers(1, 20), st.integers(0, 40))
def test_resolving_twice_changes_nothing_more(
    asked: GraphConfig, groups: list[AttentionGroup], rows: int, more: int
) -> None:
    try:
        first = resolve(asked, groups, max_requests=rows, max_tokens=rows + more)
    except ConfigError:
        return
    again = resolve(first.config, groups, max_requests=rows, max_tokens=rows + more)
    assert again.config == first.config
    assert {change.rule for change in again.changes} <= {"ladder-fits-buffers"}  # of longer query lengths
    keys = [capture_keys(config, max_requests=rows, max_tokens=rows + more) for config in (first.config, again.config)]
    assert keys[0] == keys[1]


def test_a_resolution_is_quick() -> None:
    asked = GraphConfig(DecodePhase(FULL, Ladder.vllm(512), (1, 4)), PrefillPhase(FULL, Ladder.sglang_prefill(8192)))
    flash = [AttentionGroup("flash", Support.UNIFORM_BATCH)]

    def seconds() -> float:
        started = time.perf_counter()
        resolve(asked, flash, max_requests=256, max_tokens=4096)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(20)) < 1e-3


def test_compiled_segments_are_piecewise_and_others_breakable() -> None:
    groups = [AttentionGroup("flash", Support.UNIFORM_BATCH)]
    resolution = resolved(replace(config(), compile="inductor"), *groups)
    assert [change.rule for change in resolution.changes] == ["full-prefill-needs-always", "compiled-is-piecewise"]
    assert resolution.config.prefill.backend is Backend.PIECEWISE and resolution.config.decode.backend is FULL
    assert Mode.PIECEWISE in capture_keys(resolution.config, max_requests=16, max_tokens=64).values()
    resolution = resolved(config(Backend.PIECEWISE, DISABLED))
    assert only(resolution).rule == "piecewise-needs-compile" and resolution.config.decode.backend is BREAKABLE
    with pytest.raises(ConfigError, match="set compile, or ask for breakable"):
        resolved(config(Backend.PIECEWISE, DISABLED), strict=True)


def test_a_debug_mode_of_breaks_compiles_nothing() -> None:
    asked = replace(config(DISABLED, Backend.PIECEWISE), compile="inductor", debug=Debug.BREAK_EVERY_OP)
    resolution = resolved(asked)
    assert [change.rule for change in resolution.changes] == ["debug-compiles-nothing", "piecewise-needs-compile"]
    assert (resolution.config.compile, resolution.config.prefill.backend) == ("off", BREAKABLE)


@pytest.mark.parametrize("compile", ["off", "inductor"])
def test_vllms_piecewise_is_compiled_where_anything_is(compile: str) -> None:
    preset = GraphConfig.preset("FULL_AND_PIECEWISE", ladder=ROWS, prefill_ladder=TOKENS, compile=compile)
    assert preset.prefill.backend is (BREAKABLE if compile == "off" else Backend.PIECEWISE)
    assert not resolved(preset, strict=True).changes
