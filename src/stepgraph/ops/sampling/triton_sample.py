"""Sampling on a GPU: four launches, each row shared by several programs, whatever the rows ask for.

1. `sample_first`: the largest scaled logit of every part of a row; with noise where a row filters nothing.
2. `sample_histogram`: for rows with top-k or top-p, how many tokens and how much weight lie in each bin.
3. `sample_sure`: the best of the tokens that are kept for certain; the few that are not are put on a list.
4. `sample_finish`: settles the list, or the whole row where the list is too short for it, and picks the token.

Rows that do not need a launch leave it at once. Counts and weights are integers and lists are searched by value, so
that no result depends on the order in which programs ran, or on how many shared a row.
"""

from dataclasses import dataclass

import torch
import triton

from stepgraph.ops.overlap import can_overlap, launched
from stepgraph.ops.sampling.triton_passes import sample_finish, sample_first, sample_histogram, sample_sure


@dataclass(frozen=True)
class SamplePlan:
    """block: tokens a program has in hand. bins: of the histogram. room: of the list. programs: all rows together.

    block, bins and room are powers of two.
    """

    block: int = 2048
    bins: int = 2048
    room: int = 2048
    programs: int = 1024

    def parts(self, rows: int, vocab: int) -> tuple[int, int]:
        """(parts of a row, blocks in each)."""
        blocks = triton.cdiv(vocab, self.block)
        each = triton.cdiv(blocks, min(blocks, max(self.programs // rows, 1)))
        return triton.cdiv(blocks, each), each


def sample_triton(
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
    plan: SamplePlan = SamplePlan(),
) -> None:
    """`sample` for CUDA tensors; see there. Reads nothing on the host."""
    rows, vocab = logits.shape
    if not rows:
        return
    parts, each = plan.parts(rows, vocab)

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    tops, lowest, sure = (scratch(parts, dtype=float32) for _ in range(3))
    top_tokens, sure_tokens = (scratch(parts, dtype=int32) for _ in range(2))
    counts, masses = scratch(plan.bins, dtype=int32), scratch(plan.bins, dtype=int64)
    listed, listed_x = scratch(dtype=int32), scratch(plan.room, dtype=float32)
    listed_tokens = scratch(plan.room, dtype=int32)

    settings = (temperature, top_k, top_p, torch.zeros_like(temperature) if min_p is None else min_p)
    unused = temperature  # stands in for what the kernels do not touch without PENALTIES
    penalties = [unused if t is None else t for t in (seen, repetition_penalty, presence_penalty, frequency_penalty)]
    row = (logits, logits.stride(0), vocab, *settings, *penalties)
    noise = (seed, position)
    bins, found = (tops, lowest, counts, masses), (sure, sure_tokens, listed, listed_x, listed_tokens)
    overlap = can_overlap(logits.device)
    grid, shape = (parts, rows), {"BLOCK": plan.block, "BINS": plan.bins, "PENALTIES": seen is not None, "PDL": overlap}
    shape |= {"num_warps": 8, "enable_fp_fusion": False, **launched(overlap)}
    lanes = {"LANES": triton.next_power_of_2(triton.cdiv(vocab, plan.block))}  # one kernel for every batch size
    sample_first[grid](*row, *noise, *bins, top_tokens, listed, each, **shape)
    sample_histogram[grid](*row, *bins, each, **shape, **lanes)
    sample_sure[grid](*row, *noise, *bins, *found, each, ROOM=plan.room, **shape, **lanes)
    sample_finish[(rows,)](*row, *noise, *bins, top_tokens, *found, out, parts, ROOM=plan.room, **shape, **lanes)
