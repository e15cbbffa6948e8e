"""The end of a decode step in plain torch: the truth in tests, and what runs on the CPU."""

import torch


def advance_reference(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    limits: torch.Tensor,
    stops: torch.Tensor,
    mailboxes: torch.Tensor,
    told: torch.Tensor,
    halt: torch.Tensor,
    block_size: int,
) -> None:
    """`advance` without the custom operator; see there."""
    alive = seq_lens > 0
    tokens.mul_(alive)
    positions.add_(alive)
    seq_lens.add_(alive)
    ended = alive & (((limits > 0) & (seq_lens >= limits)) | (tokens[:, None] == stops).any(1))
    line = positions % told.shape[1]
    told[mailboxes[alive].long(), line[alive]] = torch.where(ended, ~tokens, tokens)[alive]
    next_block = (positions // block_size).clamp_(max=block_tables.shape[1] - 1)
    stuck = alive & ~ended & (block_tables.gather(1, next_block[:, None])[:, 0] == 0)
    if (ended | stuck).any():
        halt.fill_(1)
    for state in (positions, seq_lens, block_tables[:, 0]):
        state.mul_(~ended)
