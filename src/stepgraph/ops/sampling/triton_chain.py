"""The sampling chain on a GPU: seven launches over a float32 copy of the logits."""

import torch
import triton
import triton.language as tl

from stepgraph.ops.sampling.triton_rows import (
    INT_MIN,
    asked,
    better_of,
    divided,
    gumbel,
    key_of,
    lowest_kept,
    note,
    scaled,
    share_of,
    source_of,
    uniform_from,
    winner,
)
from stepgraph.ops.sampling.triton_threshold import mass_from, threshold
from stepgraph.runtime.regions import region


def chain_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    block: int = 4096,
) -> None:
    """`sample_chain` for CUDA tensors. block: tokens a program has in hand, a power of two."""
    rows, vocab = logits.shape
    if not rows:
        return
    parts = triton.cdiv(vocab, block)
    work = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    scores = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    settings = (temperature, top_k, top_p, torch.zeros_like(temperature) if min_p is None else min_p)
    unused = temperature  # stands in for what the kernels do not touch without PENALTIES
    penalties = [unused if t is None else t for t in (seen, repetition_penalty, presence_penalty, frequency_penalty)]
    has, shape = {"PENALTIES": seen is not None}, {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}
    with region("penalties"):
        _penalties[parts, rows](logits, work, logits.stride(0), vocab, *penalties, **has, **shape)
    with region("temperature"):
        _temperature[parts, rows](work, vocab, *settings, **shape)
    with region("top_k"):
        _top_k[(rows,)](work, vocab, *settings, **shape)
    with region("top_p"):
        _top_p[(rows,)](work, vocab, *settings, **shape)
    with region("softmax"):
        _softmax[(rows,)](work, vocab, *settings, **shape)
    with region("draw"):
        _draw[parts, rows](work, vocab, *settings, seed, position, scores, tokens, **shape)
    with region("gather"):
        lanes = triton.next_power_of_2(parts)
        _gather[(rows,)](scores, tokens, out, parts, vocab, *penalties, **has, LANES=lanes, num_warps=1)


@triton.jit
def _penalties(
    logits, work, row_stride, vocab, seen, repetitions, presences, frequencies,
    PENALTIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = source_of(row, logits, row_stride, vocab, 1.0, seen, vocab, repetitions, presences, frequencies)
    x = scaled(source, tokens, PENALTIES)
    tl.store(work + row * vocab + tokens, x, mask=tokens < vocab)


@triton.jit
def _temperature(work, vocab, temperatures, top_ks, top_ps, min_ps, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    temperature, _, _, _, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(work + row * vocab + tokens, mask=tokens < vocab, other=0.0)
    tl.store(work + row * vocab + tokens, divided(x, temperature), mask=tokens < vocab)


@triton.jit
def _top_k(work, vocab, temperatures, top_ks, top_ps, min_ps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, draws, by_count, _, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    min_p = tl.load(min_ps + row)
    if by_count | (draws & (min_p > 0)):
        source = (work + row * vocab, vocab, 1.0, row, work, work, work, work)
        top = _top(source, vocab, BLOCK)
        floor = lowest_kept(top, min_p)
        least = tl.full([], INT_MIN, tl.int64)
        if by_count & (top > float("-inf")):
            top_k = tl.load(top_ks + row)
            least = threshold(source, work, floor, vocab, least, top, top_k, False, False, False, BLOCK)
        _drop(work + row * vocab, vocab, floor, least, BLOCK)


@triton.jit
def _top_p(work, vocab, temperatures, top_ks, top_ps, min_ps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, _, _, by_mass, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    if by_mass:
        source = (work + row * vocab, vocab, 1.0, row, work, work, work, work)
        top = _top(source, vocab, BLOCK)
        if top > float("-inf"):
            least = tl.full([], INT_MIN, tl.int64)
            floor = float("-inf")
            mass = mass_from(source, work, floor, vocab, least, top, False, False, BLOCK)
            wanted = share_of(mass, tl.load(top_ps + row))
            least = threshold(source, work, floor, vocab, least, top, wanted, True, False, False, BLOCK)
            _drop(work + row * vocab, vocab, floor, least, BLOCK)


@triton.jit
def _softmax(work, vocab, temperatures, top_ks, top_ps, min_ps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, draws, _, _, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    if draws:
        top = _top((work + row * vocab, vocab, 1.0, row, work, work, work, work), vocab, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = tl.load(work + row * vocab + tokens, mask=tokens < vocab, other=float("-inf"))
            total += tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
        whole = tl.maximum(tl.sum(total), 1.0)  # less only where the row holds no number
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = tl.load(work + row * vocab + tokens, mask=tokens < vocab, other=float("-inf"))
            p = tl.where(x > float("-inf"), tl.exp(x - top), 0.0) / whole
            tl.store(work + row * vocab + tokens, p, mask=tokens < vocab)


@triton.jit
def _draw(work, vocab, temperatures, top_ks, top_ps, min_ps, seeds, positions, scores, tokens_out, BLOCK: tl.constexpr):
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    _, draws, _, _, _ = asked(row, vocab, temperatures, top_ks, top_ps, min_ps)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(work + row * vocab + tokens, mask=tokens < vocab, other=float("-inf"))
    if draws:
        noise = gumbel(uniform_from(tl.load(seeds + row), tl.load(positions + row), part * BLOCK, BLOCK))
        x = tl.where(x > 0, tl.log(x) + noise, float("-inf"))
    best, index = better_of(x, tokens, tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32))
    value, token = winner(best, index)
    tl.store(scores + row * parts + part, value)
    tl.store(tokens_out + row * parts + part, token)


@triton.jit
def _gather(
    scores, tokens, out, parts, vocab, seen, repetitions, presences, frequencies,
    PENALTIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < parts
    value = tl.load(scores + row * parts + lanes, mask=inside, other=float("-inf"))
    _, token = winner(value, tl.load(tokens + row * parts + lanes, mask=inside, other=0))
    tl.store(out + row, token.to(tl.int64))
    if PENALTIES:
        note(seen + row * vocab, token, row, repetitions, presences, frequencies)


@triton.jit
def _top(source, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        best = tl.maximum(best, scaled(source, start + tl.arange(0, BLOCK), False))
    return tl.max(best)


@triton.jit
def _drop(row_ptr, vocab, floor, least, BLOCK: tl.constexpr):
    """Make -inf of what lies below a value or a key."""
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab
        x = tl.load(row_ptr + tokens, mask=inside, other=0.0)
        gone = (x < floor) | (key_of(x) < least)
        tl.store(row_ptr + tokens, tl.zeros_like(x) + float("-inf"), mask=inside & gone)
