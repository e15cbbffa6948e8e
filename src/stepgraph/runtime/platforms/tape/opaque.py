"""Functions the tape takes whole: compiled ones, and those that read memory on their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stepgraph.runtime.platforms.tape.recorder import TapeRecorder

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F) -> F:
    """Mark a function as one record of a tape: it is called again at every replay, on frozen arguments.

    Use it around `torch.compile`d functions and around code that needs `data_ptr()` or host reads on the CPU.
    Its tensor arguments and results keep their addresses; what it reads by closure is read afresh each time.
    Outside a tape, on CUDA too, it is a plain call.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, TapeRecorder):
                return mode.call_opaque(function, args, kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
