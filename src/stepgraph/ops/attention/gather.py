"""Where the real tokens of a batch lie in the paged cache, as flat indices for one `index_select` per chunk of rows.

The indices are the same for every layer of a step, so the last plan is kept, and used again only while the lengths and
tables it was made from are equal *by value*: a change in place, as a replay makes, is always seen.
"""

from dataclasses import dataclass

import torch

from stepgraph.runtime.errors import InputError

Rows = slice | torch.Tensor
Reach = tuple[int, ...] | None
"""How many of its last tokens are gathered of each row, at most; None: all."""

_CHUNK_COST_BYTES = 256 << 10  # launching one more chunk costs what gathering this much costs (measured)
_CHUNK_MAX_BYTES = 3 << 20  # larger gathers fall out of the CPU's caches before they are used (measured)


@dataclass(frozen=True)
class Chunk:
    """Rows of similar length that are gathered and computed together."""

    rows: Rows
    num_rows: int
    max_len: int
    index: torch.Tensor
    """int64 [2 * num_rows * kv_heads * max_len] into `unit_view`: a row's last `max_len` tokens. Past its end the last
    one repeats, so that nothing stale (NaN in an unused slot) is ever read."""
    bias: torch.Tensor
    """[num_rows * kv_heads, 1, max_len]: 0 on real tokens, -inf past the end."""


@dataclass(frozen=True)
class GatherPlan:
    """The chunks of one batch, and what they were made from."""

    chunks: tuple[Chunk, ...]
    empty: Rows | None
    layout: tuple[object, ...]
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    def holds_for(self, layout: tuple[object, ...], block_tables: torch.Tensor, seq_lens: torch.Tensor) -> bool:
        return (
            self.layout == layout
            and torch.equal(self.seq_lens, seq_lens)
            and torch.equal(self.block_tables, block_tables)
        )


class PlanMemo:
    """Keeps the last plan. One reference is swapped at a time, so threads may share a memo."""

    def __init__(self) -> None:
        self._last: GatherPlan | None = None

    def get(
        self, kv: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, *, merge: bool, reach: Reach = None
    ) -> GatherPlan:
        """The plan for these lengths and tables; `merge` lets rows share a chunk."""
        layout = (kv.stride(0), *kv.shape[2:], kv.dtype, kv.device, merge, reach)
        plan = self._last
        if plan is None or not plan.holds_for(layout, block_tables, seq_lens):
            plan = self._last = _make_plan(kv, block_tables, seq_lens, layout, merge, reach)
        return plan


def unit_view(kv: torch.Tensor) -> torch.Tensor:
    """One layer's cache as [units, head_dim]: one unit is one token's K or V of one head.

    Raises InputError where `kv` is not laid out as the contract says.
    """
    num_blocks, two, block_size, kv_heads, head_dim = kv.shape
    token = kv_heads * head_dim
    if two != 2 or kv.stride()[1:] != (block_size * token, token, head_dim, 1) or kv.stride(0) % head_dim:
        raise InputError(
            f"attention: the KV view has shape {tuple(kv.shape)} and strides {kv.stride()}; expected "
            "[num_blocks, 2, block_size, kv_heads, head_dim], contiguous within a block"
        )
    units = (num_blocks - 1) * (kv.stride(0) // head_dim) + 2 * block_size * kv_heads
    return kv.as_strided((units, head_dim), (head_dim, 1))


def _make_plan(
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: tuple[object, ...],
    merge: bool,
    reach: Reach,
) -> GatherPlan:
    lens = seq_lens.tolist()
    room = block_tables.shape[1] * kv.shape[2]
    if lens and max(lens) > room:
        row = max(range(len(lens)), key=lens.__getitem__)
        raise InputError(f"attention: row {row} has {lens[row]} tokens, but its block table has room for {room}")
    seen = lens if reach is None else [min(pair) for pair in zip(lens, reach, strict=True)]
    real = [row for row, length in enumerate(lens) if length > 0]
    token_bytes = 2 * kv.shape[3] * kv.shape[4] * kv.element_size()
    groups = _group_by_length(real, seen, token_bytes) if merge else [[row] for row in real]
    empty = [row for row, length in enumerate(lens) if length <= 0]
    return GatherPlan(
        chunks=tuple(_make_chunk(rows, max(seen[row] for row in rows), kv, block_tables, seq_lens) for rows in groups),
        empty=_as_rows(empty, kv.device) if empty else None,
        layout=layout,
        block_tables=block_tables.clone(),
        seq_lens=seq_lens.clone(),
    )


def _group_by_length(real: list[int], lens: list[int], token_bytes: int) -> list[list[int]]:
    """Split rows where padding them to the longest would cost more than one more chunk, or fall out of the caches."""
    groups: list[list[int]] = []
    longest = wasted = 0
    for row in sorted(real, key=lens.__getitem__, reverse=True):
        wasted += (longest - lens[row]) * token_bytes
        full = groups and (len(groups[-1]) + 1) * longest * token_bytes > _CHUNK_MAX_BYTES
        if not groups or full or wasted > _CHUNK_COST_BYTES:
            groups.append([])
            longest, wasted = lens[row], 0
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _make_chunk(
    rows: list[int], max_len: int, kv: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> Chunk:
    _, _, block_size, kv_heads, head_dim = kv.shape
    where, device = _as_rows(rows, kv.device), kv.device
    lens = seq_lens[where].long()[:, None]
    position = torch.arange(max_len, device=device) + (lens - max_len).clamp_(min=0)
    held = torch.minimum(position, lens - 1)
    block = block_tables[where].long().gather(1, held // block_size)
    token = block * (kv.stride(0) // head_dim) + held % block_size * kv_heads
    head = torch.arange(kv_heads, device=device)[:, None]
    half = torch.arange(2, device=device)[:, None, None, None] * (block_size * kv_heads)
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    bias = torch.zeros(held.shape, dtype=compute, device=device).masked_fill_(position >= lens, float("-inf"))
    return Chunk(
        rows=where,
        num_rows=len(rows),
        max_len=max_len,
        index=(half + token[:, None, :] + head).flatten(),
        bias=bias.repeat_interleave(kv_heads, 0)[:, None, :],
    )


def _as_rows(rows: list[int], device: torch.device) -> Rows:
    """A slice where the rows are consecutive, since a slice is a view and an index is a copy."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
