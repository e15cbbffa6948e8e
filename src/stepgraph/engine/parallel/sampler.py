"""Sampling on ranks that have a part of the vocabulary each: one gather, and every rank has the same tokens."""

from __future__ import annotations

import torch

from stepgraph.comm.gather import Gather
from stepgraph.ops.sampling.penalties import Penalties
from stepgraph.ops.sampling.shard import (
    choose_token,
    offer_candidates,
    offer_reference,
    offer_width,
    scaled_logits,
)
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
        part, on_gpu = self._part, logits.device.type == "cuda"
        whole = Penalties.given(repetition_penalty, presence_penalty, frequency_penalty, seen)
        mine = None if whole is None else whole._replace(seen=whole.seen[:, part.start : part.stop])
        width = offer_width(self._candidates)
        offer = torch.empty(len(logits), width, dtype=torch.int32, device=logits.device)
        row = (temperature, top_k, top_p, seed, position)
        if on_gpu:
            from stepgraph.ops.sampling.triton_shard import offer_best  # a CPU machine may lack triton

            offer_best(logits, *row, offer, part.start, self._vocab, min_p, mine)
            if self._candidates:
                offer_candidates(scaled_logits(logits, temperature, mine), offer, part.start)
        else:
            self._offer(logits, *row, offer, part.start, self._vocab, min_p, mine)
        offers = self._gather(offer)
        if on_gpu and not self._candidates:
            from stepgraph.ops.sampling.triton_shard import choose_best

            choose_best(offers, out, whole)  # notes the tokens too
            return
        choose_token(offers, *row, out, self._vocab, min_p)
        if whole is not None:
            whole.note(out)
