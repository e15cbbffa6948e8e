"""Which line of the user's Python did it: the first frame outside torch and the runtime."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SKIPPED = (_TORCH, _RUNTIME, contextlib.__file__)
_COMPILED = f"{os.sep}torchinductor_"  # the folder of the code that torch.compile generates


def calling_line() -> str:
    """The innermost user line of the current stack, as `file.py:12 in step: source`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_skipped(frame):
        frame = frame.f_back
    return _describe(frame, frame.f_lineno) if frame is not None else "an unknown line"


def raising_line(traceback: TracebackType | None) -> str:
    """The innermost user line of a traceback, in the same form."""
    found: tuple[FrameType, int] | None = None
    while traceback is not None:
        if not _is_skipped(traceback.tb_frame):
            found = (traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return _describe(*found) if found is not None else "an unknown line"


def _is_skipped(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_SKIPPED) or _COMPILED in name


def _describe(frame: FrameType, line: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line).strip()
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}: {source}"
