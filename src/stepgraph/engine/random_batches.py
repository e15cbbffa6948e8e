"""Batches as the engine might have them, drawn at random: what `verify` replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.ending import STOP_IDS
from stepgraph.engine.kv_blocks import BLOCK_SIZE, blocks_for
from stepgraph.runtime.batch import BatchDescriptor

_SEEN = 32  # distinct tokens that a row has seen, at most


@dataclass(frozen=True)
class RandomBatches:
    """Called with a live batch and a CPU generator, gives the rows of every slot of the step: random lengths, blocks
    that no two requests share, and any sampling parameters. The batch is one that `nearest` gives.

    vocab_size: tokens are drawn below it. max_model_len: longest request in tokens. num_blocks: KV blocks 1 to this are
    used. max_blocks: width of a block table. penalties: whether rows may ask for them. adapter_slots: where adapters
    may lie; a batch says how many it has.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    max_blocks: int
    penalties: bool
    device: torch.device
    adapter_slots: int = 0

    def nearest(self, batch: BatchDescriptor, most_requests: int) -> BatchDescriptor:
        """The batch itself where the engine can have it, else with more requests, that none is too long, or with
        fewer tokens, that there are blocks for all.

        most_requests: that its key holds.
        """
        requests, tokens = batch.num_reqs or 0, batch.num_tokens
        if batch.is_uniform:
            return BatchDescriptor.decode(min(requests, self.num_blocks), num_loras=batch.num_loras)
        requests = min(max(requests, -(-tokens // self.max_model_len)), most_requests, self.num_blocks)
        tokens = min(tokens, requests * self.max_model_len)
        if requests * blocks_for(self.max_model_len) > self.num_blocks:  # so many tokens fit, however they are cut
            tokens = min(tokens, requests - 1 + (self.num_blocks - requests + 1) * BLOCK_SIZE)
        return BatchDescriptor.mixed(tokens, requests, batch.num_loras)

    def __call__(self, batch: BatchDescriptor, generator: torch.Generator) -> dict[str, Any]:
        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        def either(*values: float) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32)[integers(0, len(values), requests)]

        requests, tokens = batch.num_reqs or 0, batch.num_tokens
        query_lens = self._cut(tokens, requests, generator)
        held = (query_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        spare = (self.num_blocks - int(held.sum())) // requests * BLOCK_SIZE  # tokens that each may have before
        lengths = (query_lens + integers(0, spare + 1, requests)).clamp(max=self.max_model_len)

        blocks, tables = torch.randperm(self.num_blocks, generator=generator) + 1, []
        for length in lengths.tolist():
            mine, blocks = blocks[: blocks_for(length)], blocks[blocks_for(length) :]
            tables.append(torch.nn.functional.pad(mine, (0, self.max_blocks - len(mine))))

        prompt = integers(0, self.vocab_size, tokens)
        decodes = (query_lens == 1) & (integers(0, 2, requests) == 0 if not batch.is_uniform else torch.tensor(True))
        prompt[(query_lens.cumsum(0) - 1)[decodes]] = -1
        inputs = {
            "tokens": integers(0, self.vocab_size, requests),
            "positions": lengths - 1,
            "seq_lens": lengths.int(),
            "block_tables": torch.stack(tables).int(),
            "query_lens": query_lens.int(),
            "prompt_tokens": prompt,
            "limits": torch.where(integers(0, 2, requests) == 0, 0, lengths + integers(1, 3, requests)).int(),
            "mailboxes": torch.zeros(requests, dtype=torch.int32),
            "stops": integers(-1, self.vocab_size, requests, STOP_IDS),
            "temperature": either(0.0, 0.8),
            "top_k": either(0, 20).int(),
            "top_p": either(1.0, 0.9),
            "min_p": either(0.0, 0.05),
            "seed": integers(-(2**63), 2**63 - 1, requests),
        }
        if self.penalties:
            seen = torch.zeros(requests, self.vocab_size, dtype=torch.int32, device=self.device)
            seen.scatter_(1, integers(0, self.vocab_size, requests, _SEEN).to(self.device), 3)
            inputs |= {
                "repetition_penalty": either(1.0, 1.3),
                "presence_penalty": either(0.0, 0.5),
                "frequency_penalty": either(0.0, 0.5),
                "seen": seen,
            }
        if self.adapter_slots:
            index = integers(-1, batch.num_loras, requests)
            slots = torch.randperm(self.adapter_slots, generator=generator)
            inputs |= {"lora_index": index.int(), "lora_slot": slots[index.clamp(min=0)].int()}
        return inputs

    def _cut(self, tokens: int, requests: int, generator: torch.Generator) -> torch.Tensor:
        """Tokens of each request: cut anywhere, and what is too much for one goes to others."""
        cuts = torch.randperm(tokens - 1, generator=generator)[: requests - 1].sort().values + 1
        lens = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([tokens]))
        room = (self.max_model_len - lens).clamp(min=0)
        lens.clamp_(max=self.max_model_len)
        taken = room.cumsum(0).clamp(max=tokens - int(lens.sum()))
        return lens + torch.diff(taken, prepend=torch.tensor([0]))
