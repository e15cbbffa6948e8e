"""`advance`: one custom operator, torch on the CPU and one Triton launch on a GPU."""

from typing import Any

import torch

from stepgraph.ops.advance.reference import advance_reference
from stepgraph.runtime.errors import ConfigError


def advance(
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
    """Take in the token that each row has chosen. A row of length 0 is dead and gets token 0; nothing else is done.

    A row ends with one of its `stops`, or with the token that brings it to its limit. It is then dead: length and
    position are 0 and the first entry of its block table too, so that it reads and writes the null block only.

    Args:
        tokens: int64 [rows], just chosen. A row that ends keeps its last one.
        positions: int64 [rows], where the token before stands.
        seq_lens: int32 [rows], tokens in all, without the one chosen.
        block_tables: int32 [rows, blocks].
        limits: int32 [rows], the most tokens in all; 0: none.
        stops: int64 [rows, ids], filled up with -1.
        mailboxes: int32 [rows], each row's place in `told`.
        told: int64 [mailboxes, lines]. The token at position p of a text goes to line p modulo lines, as ~token if the
            row ends with it. Nothing is told of dead rows.
        halt: int32 [1]. Becomes 1 where a row ends, or one that goes on has no block for its next token.
        block_size: tokens of a block.

    Safe to capture: nothing is read on the host of a GPU.
    Raises ConfigError on CUDA where triton is not installed.
    """
    torch.ops.stepgraph.advance(
        tokens, positions, seq_lens, block_tables, limits, stops, mailboxes, told, halt, block_size
    )


def _advance_cuda(*arguments: Any) -> None:
    try:
        from stepgraph.ops.advance.triton_advance import advance_triton  # a CPU machine may lack triton
    except ImportError as error:
        raise ConfigError(f"decoding on cuda: the triton package does not load ({error}); install triton") from error
    advance_triton(*arguments)


def _returns_nothing(*_: object) -> None:
    """The fake form: it writes its arguments and returns nothing."""


torch.library.define(
    "stepgraph::advance",
    "(Tensor(a!) tokens, Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) block_tables, Tensor limits,"
    " Tensor stops, Tensor mailboxes, Tensor(e!) told, Tensor(f!) halt, int block_size) -> ()",
)
torch.library.impl("stepgraph::advance", "cpu", advance_reference)
torch.library.impl("stepgraph::advance", "cuda", _advance_cuda)
torch.library.register_fake("stepgraph::advance", _returns_nothing)
