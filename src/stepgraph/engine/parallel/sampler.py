"""Sampling on ranks that have a part of the vocabulary each: one gather, and every rank has the same tokens."""

from __future__ import annotations

import torch

from stepgraph.comm.gather import Gather
from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import choose_token, offer_reference, offer_width
from stepgraph.runtime.platforms.tape import opaque


class ShardedSampler:
    """Called as `sample`, with the logits of this rank's part of the vocabulary.

    part: its tokens. vocab: tokens in all. candidates: that each rank offers to rows that filter; 0: no row may.
    """

    def __init__(self, gather: Gather, part: range, vocab: int, candidates: int) -> None:
        self._gather, self._part, self._vocab, self._candidates = gather, part, vocab, candidates
        self._offer = opaque(offer_reference)  # reads on the host, which a tape takes whole

    def __call__(
        self,
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
    ) -> None:
        part = self._part
        whole = Penalties.given(repetition_penalty, presence_penalty, frequency_penalty, seen)
        mine = None if whole is None else whole._replace(seen=whole.seen[:, part.start : part.stop])
        offer, choose = self._offer, choose_token
        if logits.device.type == "cuda":
            from stepgraph.ops.sampling import triton_shard  # a CPU machine may lack triton

            offer, choose = triton_shard.offer_triton, triton_shard.choose_triton
        offered = torch.empty(len(logits), offer_width(self._candidates), dtype=torch.int32, device=logits.device)
        row = (temperature, top_k, top_p, seed, position)
        offer(logits, *row, offered, part.start, self._vocab, min_p, mine)
        choose(self._gather(offered), *row, out, self._vocab, min_p, whole)
