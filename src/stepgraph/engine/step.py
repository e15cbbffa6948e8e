"""The engine's step, which graphs hold: one function for plain decoding and for batches with prefill in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stepgraph.engine.ending import ending_slots
from stepgraph.engine.lora import LoraSlots
from stepgraph.engine.lora.rows import adapter_slots
from stepgraph.engine.model import DecoderModel
from stepgraph.engine.sampling_state import sampling_slots
from stepgraph.ops.advance import advance
from stepgraph.ops.attention import AttentionBackend
from stepgraph.ops.lora import LayerAdapters, LoraRows
from stepgraph.ops.operations import Hidden
from stepgraph.ops.sampling import Sampler
from stepgraph.runtime.breaks import graph_break
from stepgraph.runtime.regions import region
from stepgraph.runtime.slots import PaddingPolicy, Slot


def step_slots(
    max_blocks: int, pad_seq_len: int, penalties_over: int | None = None, *, adapters: bool = False
) -> list[Slot]:
    """The step's state. Tokens, positions, lengths and tables live on the device, which advances them; sampling
    parameters and what a batch with prefill brings belong to the host and travel when the batch changes.

    When a row ends is the host's too, and found on the device: it then stands on block 0 like a padded one.

    A row's `positions` and `seq_lens` are those of its last token in this step. query_lens: the tokens that it brings.
    prompt_tokens: one a token of the batch, -1 where it is the row's own last token, which only the device knows.
    penalties_over: see `sampling_slots`. adapters: whether rows may have them.

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
        *ending_slots(),
        *sampling_slots(penalties_over),
        *(adapter_slots() if adapters else ()),
    ]


class DecoderStep:
    """Forward, sample, and advance the rows that are alive. Called with the views of `step_slots`.

    Attention is a break in breakable recordings, and part of full ones.

    kv_cache: as `allocate_cache` makes it; written in place. told, halt: where the host reads each row's token, and
    whether rows ended; see `ops.advance`. lora: the adapters that rows may have.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        kv_cache: torch.Tensor,
        sampler: Sampler,
        told: torch.Tensor,
        halt: torch.Tensor,
        lora: LoraSlots | None = None,
    ) -> None:
        self._model, self._kv_cache, self._sample, self._lora = model, kv_cache, sampler, lora
        self._told, self._halt = told, halt
        self._decode_attention = graph_break(attention.decode, name="attention")
        self._prefill_attention = graph_break(attention.prefill, name="attention")

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        limits: torch.Tensor,
        stops: torch.Tensor,
        mailboxes: torch.Tensor,
        query_lens: torch.Tensor | None = None,
        prompt_tokens: torch.Tensor | None = None,
        lora_index: torch.Tensor | None = None,
        lora_slot: torch.Tensor | None = None,
        num_loras: int = 0,
        **sampling: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Returns each row's next token. A row in the middle of its prompt gets one that means nothing.

        num_loras: adapters that may be active; with none, nothing is computed for them.
        """
        lora = None
        if num_loras and lora_index is not None and lora_slot is not None:
            lora = LoraRows(lora_index, lora_slot, num_loras)
        if query_lens is None or prompt_tokens is None:
            last = self._decode(tokens, positions, seq_lens, block_tables, lora)
        else:
            last = self._mixed(tokens, positions, seq_lens, block_tables, query_lens, prompt_tokens, lora)
        logits = self._model.logits(last)
        with region("sampling"):
            self._sample(logits, position=positions, out=tokens, **sampling)
        with region("advance"):
            size = self._kv_cache.shape[3]
            advance(tokens, positions, seq_lens, block_tables, limits, stops, mailboxes, self._told, self._halt, size)
        return {"tokens": tokens}

    def _decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        lora: LoraRows | None,
    ) -> Hidden:
        """One token a row. Returns the rows behind the last layer."""

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self._decode_attention(q, kv, block_tables, seq_lens, out)

        return self._model.forward(tokens, positions, block_tables, self._kv_cache, attend, self._adapters(lora))

    def _mixed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_lens: torch.Tensor,
        prompt_tokens: torch.Tensor,
        lora: LoraRows | None,
    ) -> Hidden:
        """Any number of tokens a row, none included. Returns each row's last one behind the last layer.

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
            lengths = torch.maximum(seq_lens, query_lens)  # who has ended attends to the null block
            if lora is not None:
                lora = LoraRows(torch.where(real, lora.index[row], -1), lora.slot[row], lora.active)

        def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
            self._prefill_attention(q, kv, block_tables, lengths, query_start, out)

        return self._model.forward(ids, places, tables, self._kv_cache, attend, self._adapters(lora))[last]

    def _adapters(self, lora: LoraRows | None) -> list[LayerAdapters] | None:
        """lora: one row a token."""
        if lora is None or self._lora is None:
            return None
        return self._model.operations.adapters(lora, self._lora.layers)
