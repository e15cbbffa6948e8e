"""Repetition, presence and frequency penalties: what a row has seen, and what that does to its logits.

What was seen is one int32 a token: twice the times it stands in the output, plus 1 if it stands in the prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def mark_seen(seen: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor) -> None:
    """Write one row, int32 [vocab], afresh from a request's tokens, int64 [tokens] each. The host waits for nothing."""
    seen.zero_()
    seen.index_fill_(0, prompt, 1)
    seen.index_add_(0, output, torch.full(output.shape, 2, dtype=seen.dtype, device=seen.device))


class Penalties(NamedTuple):
    """Penalties of several rows under vLLM's meanings: float32 [rows] each, and `seen`, int32 [rows, vocab].

    repetition: divides the positive logits of the tokens seen and multiplies the others; 1 is off.
    presence: taken off each token of the output. frequency: as often as it stands there. 0 is off.
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def given(cls, *columns: torch.Tensor | None) -> Penalties | None:
        """In the order of the fields; None unless all are there."""
        present = [column for column in columns if column is not None]
        return cls(*present) if len(present) == len(columns) else None

    def asked(self) -> torch.Tensor:
        """bool [rows]."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    def of(self, rows: torch.Tensor) -> Penalties:
        return Penalties(*(column[rows] for column in self))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """What they make of these rows' logits, float32 [rows, vocab]."""
        count = self.seen >> 1
        factor = torch.where(self.seen > 0, self.repetition[:, None], 1.0)
        x = logits.float()
        x = torch.where(x > 0, x / factor, x * factor)
        return x - self.frequency[:, None] * count - torch.where(count > 0, self.presence[:, None], 0.0)

    def note(self, tokens: torch.Tensor) -> None:
        """Count the tokens, int64 [rows], just chosen; rows that ask for no penalty keep no count."""
        self.seen.scatter_add_(1, tokens[:, None], self.asked()[:, None].to(self.seen.dtype) * 2)
