"""Which steps are recorded: the keys of a configuration, in the order of their capture."""

from __future__ import annotations

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import Backend, Compile, GraphConfig
from stepgraph.runtime.dispatch import Mode

SEGMENTED = (Backend.BREAKABLE, Backend.PIECEWISE)
"""What is recorded in segments: PIECEWISE where it is compiled, BREAKABLE where it is not."""


def capture_keys(config: GraphConfig, *, max_requests: int, max_tokens: int) -> dict[BatchDescriptor, Mode]:
    """Every key that `config` captures, for buffers of `max_requests` rows and `max_tokens` tokens.

    Relaxed keys come first and then uniform ones, each the most tokens first, so that later ones reuse the memory of
    earlier ones. Ladders end at what the buffers hold; of a query length q these are max_tokens / q requests.
    """
    segments = Mode.BREAKABLE if config.compile is Compile.OFF else Mode.PIECEWISE
    modes = {Backend.FULL: Mode.FULL} | dict.fromkeys(SEGMENTED, segments)
    keys: dict[BatchDescriptor, Mode] = {}
    cases = sorted(config.lora_cases, reverse=True)
    prefill, decode = config.prefill, config.decode
    if prefill.ladder is not None and prefill.backend in modes:
        for tokens in reversed(prefill.ladder.upto(max_tokens).sizes):
            for case in cases:
                keys[BatchDescriptor.relaxed(tokens, case)] = modes[prefill.backend]
    if decode.ladder is not None and decode.backend in modes:
        uniform = [
            BatchDescriptor.decode(rows, query_len, case)
            for query_len in decode.query_lens
            if query_len <= max_tokens
            for rows in decode.ladder.upto(min(max_requests, max_tokens // query_len)).sizes
            for case in cases
        ]
        uniform.sort(key=lambda key: -key.num_tokens)
        keys.update((key, modes[decode.backend]) for key in uniform)
    return keys
