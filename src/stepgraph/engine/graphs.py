"""Which graphs the engine asks for: the names it knows, and the ladders that its batches need."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from stepgraph.runtime.config import Backend, Compile, GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST, Ladder, vllm_default_ceiling

Graphs = Literal[
    "full", "breakable", "piecewise", "disabled", "NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"
]
"""How decode and prefill run: both in one graph, both in graphs around attention, as they are or compiled, both
eagerly; or vLLM's names."""

_VLLM_NAMES = {"full": "FULL", "breakable": "PIECEWISE", "piecewise": "PIECEWISE", "disabled": "NONE"}
_CPU_PREFILL = Ladder.explicit([16, *(64 << power for power in range(11))])
"""In tokens; as few as leave no gap that the padding guard would refuse, for a CPU takes its time to record them."""
WARMUPS = 0
"""One of each kind will do: the step keeps nothing between calls that would have to be made outside a graph."""


def graph_config(
    graphs: Graphs | GraphConfig,
    ladder: Ladder | None,
    *,
    max_num_seqs: int,
    step_tokens: int,
    device: torch.device | str,
    lazy: bool = False,
    compile: Compile | str = Compile.OFF,
) -> GraphConfig:
    """The engine's graph configuration, before the attention backend had its say.

    ladder: of decode, in requests; by default vLLM's. Rungs above the one that holds `max_num_seqs` are left out.
    compile: what compiles the step between its breaks.
    step_tokens: most tokens of a step, where the ladder of prefill ends. On a GPU it is SGLang's.

    Raises:
        ConfigError: an unknown choice, no rows, a ladder that has no room for the batch, two ladders, pieces of a step
            that is not compiled, or `lazy` beside a GraphConfig.
    """
    if not 1 <= max_num_seqs <= LARGEST:
        raise ConfigError(
            f"max_num_seqs is {max_num_seqs}; at least one request must decode at a time, at most {LARGEST}"
        )
    if ladder is not None and not isinstance(ladder, Ladder):
        raise ConfigError(f"ladder: {ladder!r} is no Ladder; make one, for example Ladder.vllm(256) or Ladder.parse(…)")
    if isinstance(graphs, GraphConfig):
        if ladder is not None:
            raise ConfigError("ladder: graphs is a GraphConfig, which has ladders of its own; give only one of them")
        if lazy:
            raise ConfigError("lazy: graphs is a GraphConfig, which says so itself: GraphConfig(lazy=True)")
        if compile != Compile.OFF:
            raise ConfigError("compile: graphs is a GraphConfig, which has a setting of its own; give only one of them")
        return graphs
    if graphs not in get_args(Graphs):
        raise ConfigError(f"graphs: {graphs!r} is not one of {', '.join(get_args(Graphs))}")
    if graphs == "piecewise" and compile == Compile.OFF:
        raise ConfigError(
            "graphs: 'piecewise' graphs are of a compiled step; compile it, for example with inductor, or ask for "
            "'breakable', which has graphs around attention"
        )
    mode = _VLLM_NAMES.get(graphs, graphs)
    if mode == "NONE":
        return GraphConfig.preset(mode, compile=compile)
    if ladder is None:
        ladder = Ladder.vllm(max(vllm_default_ceiling(max_num_seqs), max_num_seqs))
    rung = ladder.rung(max_num_seqs)
    if rung is None:
        raise ConfigError(
            f"ladder: the largest size {ladder.max_size} has no room for a batch of {max_num_seqs}; "
            f"add a size of at least {max_num_seqs} or lower max_num_seqs"
        )
    prefill = _prefill_ladder(step_tokens, torch.device(device))
    return GraphConfig.preset(
        mode, ladder=ladder.upto(rung), prefill_ladder=prefill, warmups=WARMUPS, lazy=lazy, compile=compile
    )


def largest_batch(graphs: GraphConfig, max_num_seqs: int) -> int:
    """Rows of the largest decode step: what the ladder pads `max_num_seqs` to, or that itself where it does not."""
    if graphs.decode.backend is Backend.DISABLED or graphs.decode.ladder is None:
        return max_num_seqs
    return graphs.decode.ladder.rung(max_num_seqs) or max_num_seqs


def _prefill_ladder(step_tokens: int, device: torch.device) -> Ladder:
    if device.type == "cpu":
        return _CPU_PREFILL.upto(step_tokens)
    return Ladder.sglang_prefill(min(step_tokens, LARGEST))
