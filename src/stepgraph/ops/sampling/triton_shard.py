"""A part's best token on a GPU, and the choice among parts: two launches, and one more a step behind the gather.

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
from stepgraph.ops.sampling.triton_rows import asked, better_of, divided, gumbel, penalised, uniform_at, winner

_BLOCK, _PROGRAMS = 2048, 1024


def offer_best(
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
    """The first two columns of an offer; see `shard.offer_reference`. Reads nothing on the host."""
    rows, columns = logits.shape
    if not rows:
        return
    blocks = triton.cdiv(columns, _BLOCK)
    each = triton.cdiv(blocks, min(blocks, max(_PROGRAMS // rows, 1)))
    parts = triton.cdiv(blocks, each)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    top_tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    seen, *asked_for = _columns(penalties, temperature)
    overlap = can_overlap(logits.device)
    _best[(parts, rows)](
        logits, logits.stride(0), columns, first, vocab, temperature, top_k, top_p,
        torch.zeros_like(temperature) if min_p is None else min_p,
        seen, seen.stride(0), *asked_for, seed, position, tops, top_tokens, each,
        BLOCK=_BLOCK, PENALTIES=penalties is not None, PDL=overlap, num_warps=8, enable_fp_fusion=False,
        **launched(overlap),
    )  # fmt: skip
    lanes = triton.next_power_of_2(parts)
    _join[(rows,)](tops, top_tokens, out, out.stride(0), parts, LANES=lanes, PDL=overlap, **launched(overlap))


def choose_best(offers: torch.Tensor, out: torch.Tensor, penalties: Penalties | None = None) -> None:
    """`shard.choose_token` where no row filters: offers of two columns. One launch, which notes the tokens too.

    penalties: with `seen` of the whole vocabulary.
    """
    parts, rows, width = offers.shape
    seen, *asked_for = _columns(penalties, offers)
    overlap = can_overlap(offers.device)
    _choose[(rows,)](
        offers, rows * width, width, out, parts, seen, seen.stride(0), *asked_for,
        LANES=triton.next_power_of_2(parts), PENALTIES=penalties is not None, PDL=overlap, **launched(overlap),
    )  # fmt: skip


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
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32) + first
    for start in range(part * each * BLOCK, tl.minimum((part + 1) * each * BLOCK, columns), BLOCK):
        columns_here = start + tl.arange(0, BLOCK)
        inside = columns_here < columns
        x = tl.load(logits + row * row_stride + columns_here, mask=inside, other=float("-inf")).to(tl.float32)
        if PENALTIES:  # noqa: SIM102 (the first is decided when it compiles)
            if penalised(row, repetitions, presences, frequencies):
                known = tl.load(seen + row * seen_stride + columns_here, mask=inside, other=0)
                factor = tl.where(known > 0, tl.load(repetitions + row), 1.0)
                x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
                count = known >> 1
                x = x - tl.load(frequencies + row) * count.to(tl.float32)
                x = x - tl.where(count > 0, tl.load(presences + row), 0.0)
        x = divided(x, temperature)
        tokens = first + columns_here
        if draws & (filtered == 0):
            x += gumbel(uniform_at(seed, position, tokens))
        best, index = better_of(x, tokens, best, index)
    value, token = winner(best, index)
    tl.store(tops + row * parts + part, value)
    tl.store(top_tokens + row * parts + part, token)


@triton.jit
def _join(tops, top_tokens, out, out_stride, parts, LANES: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    value = tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    token = tl.load(top_tokens + row * parts + lanes, mask=lanes < parts, other=2147483647)
    best, index = winner(value, token)
    tl.store(out + row * out_stride, best.to(tl.int32, bitcast=True))
    tl.store(out + row * out_stride + 1, index)


@triton.jit
def _choose(
    offers, part_stride, row_stride, out, parts, seen, seen_stride, repetitions, presences, frequencies,
    LANES: tl.constexpr, PENALTIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < parts
    place = offers + lanes * part_stride + row * row_stride
    bits = tl.load(place, mask=inside, other=-8388608)
    token = tl.load(place + 1, mask=inside, other=2147483647)
    _, index = winner(bits.to(tl.float32, bitcast=True), token)
    tl.store(out + row, index.to(tl.int64))
    if PENALTIES:  # noqa: SIM102 (the first is decided when it compiles)
        if penalised(row, repetitions, presences, frequencies):
            count = seen + row * seen_stride + index
            tl.store(count, tl.load(count) + 2)
