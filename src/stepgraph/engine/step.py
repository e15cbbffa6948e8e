"""The engine's step, which graphs hold: one function for plain decoding and for batches with prefill in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stepgraph.engine.model import DecoderModel
from stepgraph.engine.sampling_state import sampling_slots
from stepgraph.ops.attention import AttentionBackend
from stepgraph.ops.sampling import Sampler
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.regions import region
from stepgraph.runtime.slots import PaddingPolicy, Slot


def step_slots(max_blocks: int, pad_seq_len: int, penalties_over: int | None = None) -> list[Slot]:
    """The step's state. Tokens, positions, lengths and tables live on the device, which advances them; sampling
    parameters and what a batch with prefill brings belong to the host and travel when the batch changes.

    A row's `positions` and `seq_lens` are those of its last token in this step. query_lens: the tokens that it brings.
    prompt_tokens: one a token of the batch, -1 where it is the row's own last token, which only the device knows.
    penalties_over: see `sampling_slots`.

    Index slots are ZERO: a padded row reads and writes block 0, which is nobody's.
    """
    zero, sentinel = PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL
    return [
        Slot("tokens", torch.int64, "request", zero, owner="device"),
        Slot("positions", torch.int64, "request", zero, owner="device"),
        Slot("seq_lens", torch.int32, "request", sentinel, pad_value=pad_seq_len, owner="device"),
        Slot("block_tables", torch.int32, "request", zero, (max_blocks,), owner="device"),
        Slot("query_lens", torch.int32, "request", zero, mixed_only=True),
        Slot("prompt_tokens", torch.int64, "token", zero, mixed_only=True),
        *sampling_slots(penalties_over),
    ]


class DecoderStep:
    """Forward, sample, and advance the rows that are alive. Called with the views of `step_slots`.

    Attention is a break in breakable recordings, and part of full ones.

    kv_cache: as `allocate_cache` makes it; written in place.
    """

    def __init__(
        self, model: DecoderModel, attention: AttentionBackend, kv_cache: torch.Tensor, sampler: Sampler
    ) -> None:
        self._model, self._kv_cache, self._sample = model, kv_cache, sampler
        self._decode_attention = graph_break(attention.decode, name="attention")
        self._prefill_attention = graph_break(attention.prefill, name="attention")

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_lens: torch.Tensor | None = None,
        prompt_tokens: torch.Tensor | None = None,
        **sampling: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Returns each row's next token. A row in the middle of its prompt gets one that means nothing."""
        if query_lens is None or prompt_tokens is None:
            last = self._decode(tokens, positions, seq_lens, block_tables)
        else:
            last = self._mixed(tokens, positions, seq_lens, block_tables, query_lens, prompt_tokens)
        logits = self._model.logits(last)
        with region("advance"):
            alive = seq_lens > 0
            positions.add_(alive)
            seq_lens.add_(alive)
        with region("sampling"):
            self._sample(logits, position=positions, out=tokens, **sampling)
        with region("advance"):
            tokens.mul_(alive)
        return {"tokens": tokens}

    def _decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> torch.Tensor:
        """One token a row. Returns hidden states [rows, hidden]."""

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self._decode_attention(q, kv, block_tables, seq_lens, out)

        return self._model.forward(tokens, positions, block_tables, self._kv_cache, attend)

    def _mixed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_lens: torch.Tensor,
        prompt_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Any number of tokens a row, none included. Returns the hidden state of each row's last one, [rows, hidden].

        Where a token stands is derived here, on the device: a recording holds for any lengths.
        """
        with region("batch"):
            ends = query_lens.cumsum(0, dtype=torch.int32)
            query_start = F.pad(ends, (1, 0))
            index = torch.arange(prompt_tokens.shape[0], dtype=torch.int32, device=prompt_tokens.device)
            row = torch.searchsorted(ends, index, right=True).clamp_(max=ends.shape[0] - 1)
            real = index < ends[-1]
            places = (positions[row] + 1 - ends[row] + index) * real
            tables = block_tables[row] * real[:, None]
            ids = torch.where(prompt_tokens < 0, tokens[row], prompt_tokens)
            last = (ends - 1).clamp_(min=0)

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self._prefill_attention(q, kv, block_tables, seq_lens, query_start, out)

        return self._model.forward(ids, places, tables, self._kv_cache, attend)[last]
