"""How much of an attention backend a CUDA graph can hold. The levels and their names are vLLM's."""

from enum import IntEnum


class AttentionCGSupport(IntEnum):
    """What may be captured; a higher level includes the lower ones, so of several backends the minimum counts.

    "Replays right" means: whatever lengths and block tables lie in the buffers at replay, up to the largest.
    """

    NEVER = 0
    """Reads lengths on the host or launches by them: a replay would repeat the lengths of the capture."""

    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Replays right for batches in which every request has one new token."""

    UNIFORM_BATCH = 2
    """Replays right for batches in which every request has the same number of new tokens (speculative verification)."""

    ALWAYS = 3
    """Replays right for any mix of prefill and decode."""
