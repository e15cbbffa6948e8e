"""The `out=` form of an operator, so that a replay writes where the recording did without a second copy."""

from __future__ import annotations

from functools import cache

import torch


@cache
def out_variant(func: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload that takes the same arguments and writes its results into given tensors, and their names.

    None where torch has no such overload. Found by comparing schemas, so custom operators are covered too.
    """
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, name)
        arguments = candidate._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if outs and len(outs) == len(func._schema.returns) and rest == wanted:
            return candidate, tuple(outs)
    return None
