"""Paged attention spelled out in float64, and caches in which everything that must not be read is NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from stepgraph.ops.attention import AttentionBackend, AttentionShape

BLOCK_SIZE = 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HEAD_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 7e-3}
"""Of a whole head, relative to its length. One token of 8192 left out is 1e-2."""


MIXED_BATCHES = [  # lengths and query lengths, for 48 tokens of 12 requests
    ([0, 1, 15, 16, 17], [0, 1, 15, 16, 16]),
    ([48], [48]),
    ([0, 100, 0, 0, 33, 17, 0], [0, 17, 0, 0, 1, 15, 0]),
    ([1, 16, 17, 64, 65, 0, 150, 33, 2, 15, 128, 90], [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
    ([], []),
    ([150, 33], [40, 1]),
]


@dataclass(frozen=True)
class Case:
    """One layer's cache, the lengths in it, and queries: `query_lens[r]` last tokens of each request."""

    q: torch.Tensor
    kv: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    window: int | None = None

    @property
    def shape(self) -> AttentionShape:
        _, num_heads, head_dim = self.q.shape
        return AttentionShape(num_heads, self.kv.shape[3], head_dim, self.kv.shape[2], self.window)

    def to(self, device: torch.device | str) -> Case:
        """The same on a device; the cache keeps its strides."""
        moved = torch.empty_strided(self.kv.shape, self.kv.stride(), dtype=self.kv.dtype, device=device)
        moved.copy_(self.kv)
        small = (t.to(device) for t in (self.block_tables, self.seq_lens, self.query_start))
        return Case(self.q.to(device), moved, *small, self.window)


def make_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    heads: tuple[int, int, int] = (6, 2, 32),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tail_tokens: int = 0,
    window: int | None = None,
) -> Case:
    """Scatter rows over shuffled blocks. `query_lens` None: decode, one query per row. `heads`: query, KV, size.

    NaN is all that no query sees: block 0, a block of nobody's, slots past a row's end, tokens before its window. So
    are the `tail_tokens` queries past the last request's.
    """
    num_heads, kv_heads, head_dim = heads
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    queries = list(query_lens) if query_lens is not None else [1] * len(seq_lens)
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    num_blocks = 2 + sum(needed)  # the null block, and one that nobody owns
    cache = torch.full((num_blocks, 3, 2, BLOCK_SIZE, kv_heads, head_dim), float("nan"), dtype=dtype)
    tables = torch.zeros(len(seq_lens), max(needed, default=0) + 2, dtype=torch.int32)
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    for row, length in enumerate(seq_lens):
        seen_from = 0 if window is None else max(0, length - queries[row] - window + 1)
        for index in range(seen_from // BLOCK_SIZE, needed[row]):  # blocks before the window are given back
            block = tables[row, index] = free.pop()
            first = max(0, seen_from - index * BLOCK_SIZE)
            held = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
            tokens = torch.randn(3, 2, max(0, held - first), kv_heads, head_dim, generator=noise)
            cache[block, :, :, first:held] = tokens.to(dtype)
    starts = list(accumulate(queries, initial=0))
    q = torch.randn(starts[-1] + tail_tokens, num_heads, head_dim, generator=noise).to(dtype)
    q[starts[-1] :] = float("nan")
    return Case(
        q=q,
        kv=cache[:, 1],
        block_tables=tables,
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        window=window,
    )


def in_one_room(
    batches: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    tokens: int,
    requests: int,
    heads: tuple[int, int, int] = (6, 2, 32),
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> list[Case]:
    """Batches (lengths, query lengths) in tensors of the same sizes, as one capture has them.

    Requests left over have no tokens, and every second of them has a length and a table of NaN for it.
    """
    cases = [
        make_case(*batch, heads=heads, dtype=dtype, seed=seed, tail_tokens=tokens - sum(batch[1]), window=window)
        for seed, batch in enumerate(batches)
    ]
    blocks, width = max(len(case.kv) for case in cases), max(case.block_tables.shape[1] for case in cases)
    placed = []
    for case in cases:
        kv = torch.full((blocks, 3, *case.kv.shape[1:]), float("nan"), dtype=dtype)[:, 1]
        kv[: len(case.kv)] = case.kv
        tables = torch.zeros(requests, width, dtype=torch.int32)
        tables[: len(case.block_tables), : case.block_tables.shape[1]] = case.block_tables
        lengths = torch.zeros(requests, dtype=torch.int32)
        lengths[: len(case.seq_lens)] = case.seq_lens
        lengths[len(case.seq_lens) :: 2] = 7 * (len(case.seq_lens) > 0)
        starts = case.query_start[-1].repeat(requests + 1)
        starts[: len(case.query_start)] = case.query_start
        placed.append(replace(case, kv=kv, block_tables=tables, seq_lens=lengths, query_start=starts))
    return placed


def copy_into(held: Case, case: Case) -> None:
    """Change everything in place, as between two replays."""
    for name in ("q", "kv", "block_tables", "seq_lens", "query_start"):
        getattr(held, name).copy_(getattr(case, name))


def expected(case: Case) -> torch.Tensor:
    """float64 on the CPU, like `case.q`; 0 for rows without tokens and past the last query."""
    case = case.to("cpu")
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.kv.shape[3]
    starts = case.query_start.tolist()
    for row, length in enumerate(case.seq_lens.tolist()):
        queries = case.q[starts[row] : starts[row + 1]].double()
        if length == 0 or not len(queries):
            continue
        blocks = case.kv[case.block_tables[row].long()].double()
        keys, values = (blocks[:, i].flatten(0, 1)[:length].repeat_interleave(group, 1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * case.shape.scale
        position = torch.arange(length)
        distance = position[length - len(queries) :, None] - position
        visible = (distance >= 0) & (distance < (case.window or length))
        values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)  # 0 times what nobody sees may be NaN
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def check(out: torch.Tensor, case: Case, want: torch.Tensor | None = None) -> None:
    """`out` is what `expected` says, within the dtype's tolerance, and exactly 0 on rows without tokens.

    want: what it says, if that is known.
    """
    want = expected(case) if want is None else want
    got, limit = out.cpu().double(), TOLERANCE[out.dtype]
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)
    error, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    off = (error / size)[error > HEAD_TOLERANCE[out.dtype] * size]
    assert not len(off), f"off by {off.max():.2g} in a head"
    for row in (case.seq_lens == 0).nonzero()[:, 0].tolist():
        assert not out[case.query_start[row] : case.query_start[row + 1]].any()


def run_decode(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """Into an output that holds NaN."""
    out = torch.full_like(case.q, float("nan"))
    backend.decode(case.q, case.kv, case.block_tables, case.seq_lens, out)
    return out


def run_prefill(backend: AttentionBackend, case: Case) -> torch.Tensor:
    """Tokens past the last request's start out as 0, which is what `expected` says of them."""
    out = torch.zeros_like(case.q)
    backend.prefill(case.q, case.kv, case.block_tables, case.seq_lens, case.query_start, out)
    return out


def mixed_batch(rng: random.Random, *, tokens: int, requests: int, longest: int) -> tuple[list[int], list[int]]:
    """Lengths and query lengths of some requests that fit: unused slots, single tokens, prompts and chunks."""
    lengths, queries = [], []
    for _ in range(rng.randint(1, requests)):
        left = tokens - sum(queries)
        query = min(left, rng.choice([0, 1, 1, 1, 15, 16, 17, 64, 65, left]))
        queries.append(query)
        lengths.append(query and min(longest, query + rng.choice([0, 0, 1, 15, 16, 17, 300, longest])))
    return lengths, queries


def decode_lengths(rng: random.Random) -> list[int]:
    """Lengths at the edges of blocks and tiles, a long one and empty rows, in any order."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 300, 0]
    rng.shuffle(lengths)
    return lengths
