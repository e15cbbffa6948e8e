"""A part's offer on a GPU, and the choice among parts: two launches in front of the gather and one behind. Offers with
candidates take one launch more, in which rows that do not filter leave early.

They are launched programmatically: each lets the next one start at once, and waits for the one in front before it reads
or writes anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.overlap import can_overlap, launched
from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import choose_token, offer_candidates, offer_count, scaled_logits
from stepgraph.ops.sampling.triton_candidates import MINUS_INFINITY, best_of_block, draw, join_blocks, no_candidates
from stepgraph.ops.sampling.triton_rows import (
    INT_MAX,
    asked,
    better_of,
    gumbel,
    note,
    scaled,
    source_of,
    uniform_at,
    winner,
)

_BLOCK, _PROGRAMS = 2048, 1024
_MOST_LANES = 8192  # of a program that sorts


def offer_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    first: int,
    vocab: int,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> None:
    """As `shard.offer_reference`, but that rows which do not filter offer no candidates. Reads nothing on the host."""
    rows, columns = logits.shape
    if not rows:
        return
    count = offer_count(out.shape[1])
    listed, blocks = _listed(count), triton.cdiv(columns, _BLOCK)
    if listed > _BLOCK or listed * _power(blocks) > _MOST_LANES:
        offer_candidates(scaled_logits(logits, temperature, penalties), out, first)
        count = listed = 0
    each = triton.cdiv(blocks, min(blocks, max(_PROGRAMS // rows, 1)))
    parts = triton.cdiv(blocks, each)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    top_tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    pairs = torch.empty(rows, blocks, listed, dtype=torch.int64, device=logits.device)
    sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)  # each block's largest, and its mass
    seen, *asked_for = _columns(penalties, temperature)
    filters = (temperature, top_k, top_p, torch.zeros_like(temperature) if min_p is None else min_p)
    row = (logits, logits.stride(0), columns, first, vocab, *filters, seen, seen.stride(0), *asked_for)
    overlap = can_overlap(logits.device)
    shape = {"BLOCK": _BLOCK, "PENALTIES": penalties is not None, "num_warps": 8}
    same = {"PDL": overlap, "enable_fp_fusion": False, **launched(overlap)}
    _best[(parts, rows)](*row, seed, position, tops, top_tokens, each, **shape, **same)
    if count:
        _list[(blocks, rows)](*row, pairs, *sums, COUNT=listed, **shape, **same)
    _join[(rows,)](
        tops, top_tokens, out, out.stride(0), parts, vocab, *filters, pairs, *sums, blocks, count,
        LANES=_power(parts), COUNT=listed, LISTED=_power(blocks) * listed, num_warps=8 if count else 4, **same,
    )  # fmt: skip


def choose_triton(
    offers: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    vocab: int,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> None:
    """As `shard.choose_token`, in one launch, which notes the tokens too.

    penalties: with `seen` of the whole vocabulary.
    """
    parts, rows, width = offers.shape
    count = offer_count(width)
    if parts * count > _MOST_LANES:
        choose_token(offers, temperature, top_k, top_p, seed, position, out, vocab, min_p, penalties)
        return
    filters = (temperature, top_k, top_p, torch.zeros_like(temperature) if min_p is None else min_p)
    seen, *asked_for = _columns(penalties, offers)
    overlap = can_overlap(offers.device)
    _choose[(rows,)](
        offers, rows * width, width, out, parts, count, vocab, *filters, seed, position,
        seen, seen.stride(0), *asked_for,
        PARTS=_power(parts), LANES=_listed(parts * count),
        PENALTIES=penalties is not None, PDL=overlap, num_warps=8 if parts * count > 512 else 4,
        enable_fp_fusion=False, **launched(overlap),
    )  # fmt: skip


def _power(count: int) -> int:
    return int(triton.next_power_of_2(count))


def _listed(count: int) -> int:
    """Lanes of a list that is sorted, 0 for none: a power of 2, and two for one, of which Triton 3.6 makes a number
    that is no list."""
    return _power(max(count, 2)) if count else 0


def _columns(penalties: Penalties | None, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What was seen, and the rows' settings. unused: stands in for what kernels do not touch without PENALTIES."""
    return (unused,) * 4 if penalties is None else (penalties.seen, *penalties[:3])


@triton.jit(do_not_specialize=["first", "each"])
def _best(
    logits, row_stride, columns, first, vocab, temperatures, top_ks, top_ps, min_ps,
    seen, seen_stride, repetitions, presences, frequencies, seeds, positions, tops, top_tokens, each,
    BLOCK: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, draws, _, _, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    source = source_of(
        row, logits, row_stride, columns, temperature, seen, seen_stride, repetitions, presences, frequencies
    )
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32) + first
    for start in range(part * each * BLOCK, tl.minimum((part + 1) * each * BLOCK, columns), BLOCK):
        here = start + tl.arange(0, BLOCK)
        x = scaled(source, here, PENALTIES)
        tokens = first + here
        if draws & (filtered == 0):
            x += gumbel(uniform_at(seed, position, tokens))
        best, index = better_of(x, tokens, best, index)
    value, token = winner(best, index)
    tl.store(tops + row * parts + part, value)
    tl.store(top_tokens + row * parts + part, token)


@triton.jit(do_not_specialize=["first"])
def _list(
    logits, row_stride, columns, first, vocab, temperatures, top_ks, top_ps, min_ps,
    seen, seen_stride, repetitions, presences, frequencies, pairs, block_tops, masses,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A launch of its own: its sort takes registers that would keep programs of `_best` from running side by side."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, _, _, _, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    if filtered:
        source = source_of(
            row, logits, row_stride, columns, temperature, seen, seen_stride, repetitions, presences, frequencies
        )
        here = block * BLOCK + tl.arange(0, BLOCK)
        x = scaled(source, here, PENALTIES)
        found, top, mass = best_of_block(x, tl.where(here < columns, first + here, INT_MAX), COUNT)
        place = row * blocks + block
        tl.store(pairs + place * COUNT + tl.arange(0, COUNT), found)
        tl.store(block_tops + place, top)
        tl.store(masses + place, mass)


@triton.jit
def _join(
    tops, top_tokens, out, out_stride, parts, vocab, temperatures, top_ks, top_ps, min_ps,
    pairs, block_tops, masses, blocks, count,
    LANES: tl.constexpr, COUNT: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    value = tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    token = tl.load(top_tokens + row * parts + lanes, mask=lanes < parts, other=INT_MAX)
    best, index = winner(value, token)
    offer = out + row * out_stride
    tl.store(offer, best.to(tl.int32, bitcast=True))
    tl.store(offer + 1, index)
    if COUNT > 0:
        _, _, _, _, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
        if filtered:
            join_blocks(pairs, block_tops, masses, offer, row, blocks, count, COUNT, LISTED)
        else:
            no_candidates(offer, count, COUNT)


@triton.jit
def _choose(
    offers, part_stride, row_stride, out, parts, count, vocab, temperatures, top_ks, top_ps, min_ps, seeds, positions,
    seen, seen_stride, repetitions, presences, frequencies,
    PARTS: tl.constexpr, LANES: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    place = offers + part * part_stride + row * row_stride
    bits = tl.load(place, mask=inside, other=MINUS_INFINITY)
    token = tl.load(place + 1, mask=inside, other=INT_MAX)
    _, index = winner(bits.to(tl.float32, bitcast=True), token)
    if LANES > 0:
        _, _, by_count, by_mass, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
        if filtered:
            index = draw(
                offers + row * row_stride, part_stride, parts, count, tl.load(top_ks + row), tl.load(top_ps + row),
                tl.load(min_ps + row), by_count, by_mass, tl.load(seeds + row), tl.load(positions + row), PARTS, LANES,
            )  # fmt: skip
    tl.store(out + row, index.to(tl.int64))
    if PENALTIES:
        note(seen + row * seen_stride, index, row, repetitions, presences, frequencies)
