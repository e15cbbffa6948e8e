"""Ends of decode steps, drawn at random, and what must become of each row."""

from __future__ import annotations

import random

import torch

BLOCK_SIZE = 16


def draw_case(rng: random.Random, rows: int, blocks: int = 5, ids: int = 3, lines: int = 4) -> dict[str, torch.Tensor]:
    """The arguments of `advance` by name. Few tokens, so that stops are hit."""
    lengths = [rng.choice([0, rng.randint(1, blocks * BLOCK_SIZE - 1)]) for _ in range(rows)]
    tables = [[rng.choice([0, rng.randint(1, 99)]) for _ in range(blocks)] if n else [0] * blocks for n in lengths]
    return {
        "tokens": torch.tensor([rng.randrange(6) for _ in range(rows)]),
        "positions": torch.tensor([max(n - 1, 0) for n in lengths]),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
        "limits": torch.tensor([rng.choice([0, n + 1, n + 2]) for n in lengths], dtype=torch.int32),
        "stops": torch.tensor([[rng.choice([-1, rng.randrange(6)]) for _ in range(ids)] for _ in range(rows)]),
        "mailboxes": torch.tensor(rng.sample(range(rows + 3), rows), dtype=torch.int32),
        "told": torch.full((rows + 3, lines), 77),
        "halt": torch.zeros(1, dtype=torch.int32),
    }


def expected(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `advance` makes of a case, row by row."""
    after = {name: value.clone() for name, value in case.items()}
    for row, length in enumerate(case["seq_lens"].tolist()):
        token, limit = int(case["tokens"][row]), int(case["limits"][row])
        if not length:
            after["tokens"][row] = 0
            continue
        ends = token in case["stops"][row].tolist() or 0 < limit <= length + 1
        after["told"][case["mailboxes"][row], length % case["told"].shape[1]] = ~token if ends else token
        after["positions"][row] = 0 if ends else length
        after["seq_lens"][row] = 0 if ends else length + 1
        if ends:
            after["block_tables"][row, 0] = 0
        if ends or not case["block_tables"][row, length // BLOCK_SIZE]:
            after["halt"].fill_(1)
    return after
