"""The four launches of `triton_sample`. Each program takes `each` blocks of a row; `parts` programs share it.

With PDL each lets the next one start at once, and waits for the one in front before it reads or writes anything.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stepgraph.ops.sampling.triton_bins import bin_of, cuts, span_of, undecided
from stepgraph.ops.sampling.triton_rows import (
    INT_MIN,
    asked,
    better_of,
    gumbel,
    key_of,
    lowest_kept,
    note,
    scaled,
    share_of,
    source_of,
    uniform_at,
    uniform_from,
    weight_of,
    winner,
)
from stepgraph.ops.sampling.triton_threshold import mass_from, read, threshold


@triton.jit
def _row_top(tops, lowest, row, parts, LANES: tl.constexpr):
    """The largest and the smallest finite logit of a row; -inf and inf where it has none."""
    lanes = tl.arange(0, LANES)
    top = tl.max(tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf")))
    return top, tl.min(tl.load(lowest + row * parts + lanes, mask=lanes < parts, other=float("inf")))


@triton.jit
def _best_part(values, tokens, row, parts, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    inside = lanes < parts
    value = tl.load(values + row * parts + lanes, mask=inside, other=float("-inf"))
    return winner(value, tl.load(tokens + row * parts + lanes, mask=inside, other=0))


@triton.jit(do_not_specialize=["each"])
def sample_first(
    logits, row_stride, vocab, temperatures, top_ks, top_ps, min_ps, seen, repetitions, presences, frequencies,
    seeds, positions, tops, lowest, counts, masses, top_tokens, listed, each,
    BLOCK: tl.constexpr, BINS: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, draws, _, _, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    source = source_of(row, logits, row_stride, vocab, temperature, seen, vocab, repetitions, presences, frequencies)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(part * each * BLOCK, tl.minimum((part + 1) * each * BLOCK, vocab), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = scaled(source, tokens, PENALTIES)
        low = tl.minimum(low, tl.where(x > float("-inf"), x, float("inf")))
        if draws & (filtered == 0):
            x += gumbel(uniform_from(seed, position, start, BLOCK))
        best, index = better_of(x, tokens, best, index)
    value, token = winner(best, index)
    tl.store(tops + row * parts + part, value)
    tl.store(top_tokens + row * parts + part, token)
    if filtered:
        tl.store(lowest + row * parts + part, tl.min(low))
        for start in range(part * BLOCK, BINS, parts * BLOCK):
            bins = start + tl.arange(0, BLOCK)
            tl.store(counts + row * BINS + bins, tl.zeros([BLOCK], tl.int32), mask=bins < BINS)
            tl.store(masses + row * BINS + bins, tl.zeros([BLOCK], tl.int64), mask=bins < BINS)
        if part == 0:
            tl.store(listed + row, 0)


@triton.jit(do_not_specialize=["each"])
def sample_histogram(
    logits, row_stride, vocab, temperatures, top_ks, top_ps, min_ps, seen, repetitions, presences, frequencies,
    tops, lowest, counts, masses, each,
    BLOCK: tl.constexpr, BINS: tl.constexpr, LANES: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, _, by_count, by_mass, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    if by_count | by_mass:
        source = source_of(
            row, logits, row_stride, vocab, temperature, seen, vocab, repetitions, presences, frequencies
        )
        top, low = _row_top(tops, lowest, row, parts, LANES)
        span = span_of(top, low)
        floor = lowest_kept(top, tl.load(min_ps + row))
        for start in range(part * each * BLOCK, tl.minimum((part + 1) * each * BLOCK, vocab), BLOCK):
            x = read(source, logits, floor, start, vocab, False, PENALTIES, BLOCK)
            inside = x > float("-inf")
            place = row * BINS + bin_of(x, top, span, BINS)
            if by_count:
                tl.atomic_add(counts + place, 1, mask=inside, sem="relaxed")
            if by_mass:
                weight = weight_of(x, top)
                tl.atomic_add(masses + place, weight, mask=inside & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize=["each"])
def sample_sure(
    logits, row_stride, vocab, temperatures, top_ks, top_ps, min_ps, seen, repetitions, presences, frequencies,
    seeds, positions, tops, lowest, counts, masses, sure, sure_tokens, listed, listed_x, listed_tokens, each,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, LANES: tl.constexpr, PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, _, by_count, by_mass, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    if filtered:
        source = source_of(
            row, logits, row_stride, vocab, temperature, seen, vocab, repetitions, presences, frequencies
        )
        top, low = _row_top(tops, lowest, row, parts, LANES)
        span = span_of(top, low)
        floor = lowest_kept(top, tl.load(min_ps + row))
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        cut = cuts(counts, masses, row, top_k, top_p, by_count, by_mass, BINS)
        edge, first, last = cut[0], cut[1], cut[2]
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = tl.zeros([BLOCK], tl.int32)
        for start in range(part * each * BLOCK, tl.minimum((part + 1) * each * BLOCK, vocab), BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = read(source, logits, floor, start, vocab, False, PENALTIES, BLOCK)
            inside = x > float("-inf")
            bins = bin_of(x, top, span, BINS)
            kept = inside & (bins < tl.minimum(edge, first))
            if tl.max(kept.to(tl.int32)) > 0:
                noisy = tl.where(kept, x + gumbel(uniform_from(seed, position, start, BLOCK)), float("-inf"))
                best, index = better_of(noisy, tokens, best, index)
            open_ = inside & undecided(bins, edge, first, last)
            found = tl.sum(open_.to(tl.int32))
            if found > 0:
                place = tl.atomic_add(listed + row, found, sem="relaxed") + tl.cumsum(open_.to(tl.int32), 0) - 1
                fits = open_ & (place < ROOM)
                tl.store(listed_x + row * ROOM + place, x, mask=fits)
                tl.store(listed_tokens + row * ROOM + place, tokens, mask=fits)
        value, token = winner(best, index)
        tl.store(sure + row * parts + part, value)
        tl.store(sure_tokens + row * parts + part, token)


@triton.jit(do_not_specialize=["parts"])
def sample_finish(
    logits, row_stride, vocab, temperatures, top_ks, top_ps, min_ps, seen, repetitions, presences, frequencies,
    seeds, positions, tops, lowest, counts, masses, top_tokens, sure, sure_tokens, listed, listed_x, listed_tokens,
    out, parts,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, LANES: tl.constexpr, PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature, _, by_count, by_mass, filtered = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    value, token = _best_part(tops, top_tokens, row, parts, LANES)
    if filtered:
        top = value
        value, token = _best_part(sure, sure_tokens, row, parts, LANES)
        size = tl.load(listed + row)
        if size > 0:
            source = source_of(
                row, logits, row_stride, vocab, temperature, seen, vocab, repetitions, presences, frequencies
            )
            floor = lowest_kept(top, tl.load(min_ps + row))
            top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
            drawn = (top, top_k, top_p, by_mass, tl.load(seeds + row), tl.load(positions + row))
            cut = cuts(counts, masses, row, top_k, top_p, by_count, by_mass, BINS)
            list_x, list_tokens = listed_x + row * ROOM, listed_tokens + row * ROOM
            if size <= ROOM:
                other, other_token = _settle(
                    source, list_x, list_tokens, floor, size, drawn, cut, True, PENALTIES, BLOCK, BINS
                )
            else:
                other, other_token = _settle(
                    source, list_x, list_tokens, floor, vocab, drawn, cut, False, PENALTIES, BLOCK, BINS
                )
            if (other > value) | ((other == value) & (other_token < token)):
                token = other_token
    tl.store(out + row, token.to(tl.int64))
    if PENALTIES:
        note(seen + row * vocab, token, row, repetitions, presences, frequencies)


@triton.jit
def _settle(
    source, list_x, list_tokens, floor, size, drawn, cut,
    LISTED: tl.constexpr, PENALTIES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The winner among the tokens that the exact cuts keep: of those on the list, or of the whole row."""
    top, top_k, top_p, by_mass, seed, position = drawn
    edge, hidden_count, hidden_mass, above = cut[0], cut[3], cut[4], cut[5]
    if not LISTED:
        hidden_count, hidden_mass, above = hidden_count * 0, hidden_mass * 0, above * 0
    least = tl.full([], INT_MIN, tl.int64)
    if edge < BINS:
        wanted = top_k - hidden_count
        least = threshold(source, list_x, floor, size, least, top, wanted, False, LISTED, PENALTIES, BLOCK)
    if by_mass:
        mass = hidden_mass + mass_from(source, list_x, floor, size, least, top, LISTED, PENALTIES, BLOCK)
        wanted = share_of(mass, top_p) - above
        least = threshold(source, list_x, floor, size, least, top, wanted, True, LISTED, PENALTIES, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = read(source, list_x, floor, start, size, LISTED, PENALTIES, BLOCK)
        tokens = start + tl.arange(0, BLOCK)
        if LISTED:
            tokens = tl.load(list_tokens + tokens, mask=tokens < size, other=0)
        kept = (x > float("-inf")) & (key_of(x) >= least)
        noisy = tl.where(kept, x + gumbel(uniform_at(seed, position, tokens)), float("-inf"))
        # A list is in no order, so that equals are told apart by their tokens, here and below.
        index = tl.where((noisy > best) | ((noisy == best) & (tokens < index)), tokens, index)
        best = tl.maximum(best, noisy)
    return winner(best, index)
