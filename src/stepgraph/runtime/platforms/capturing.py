"""Whether what runs now is being recorded."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_capturing(device: torch.device) -> bool:
    """Whether a graph really records the current stream, or a tape this thread: not in a warm-up, nor in a break."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    from stepgraph.runtime.platforms.tape.recorder import TapeRecorder

    recorders = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, TapeRecorder))
    return any(not recorder.paused for recorder in recorders)
