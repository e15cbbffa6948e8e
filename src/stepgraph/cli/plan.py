"""`stepgraph plan memory`: what an engine will take on a device that need not be there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.engine.config import ModelConfig
    from stepgraph.engine.graphs import Graphs
    from stepgraph.engine.lora import LoraConfig
    from stepgraph.runtime import GraphConfig


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line. model: a shape's name, a directory, or a GGUF file."""

    model: str
    profile: Path | None = None
    graphs: Graphs = "full"
    compile: str = "off"
    ladder: str = "vllm"
    dtype: str = "bfloat16"
    adapter: Path | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    chunk_tokens: int = 512
    memory_fraction: float = 0.9
    as_json: bool = False


def plan(options: PlanOptions) -> None:
    """Predict and print.

    Raises StepgraphError where the model, the profile or an option cannot work, or nothing is left for the KV cache.
    """
    import torch

    from stepgraph.cli.adapter import room_for
    from stepgraph.cli.memory_view import print_plan
    from stepgraph.engine.config import model_len
    from stepgraph.engine.graphs import graph_config
    from stepgraph.engine.lora import with_cases
    from stepgraph.engine.memory_plan import plan_memory
    from stepgraph.engine.scheduler import most_tokens
    from stepgraph.runtime import ConfigError, Ladder
    from stepgraph.runtime.memory.profile import load_profile
    from stepgraph.runtime.memory.units import in_units

    if not 0 < options.memory_fraction <= 1:
        raise ConfigError(f"memory fraction: {options.memory_fraction} is not above 0 and at most 1")
    profile = load_profile(options.profile)
    config = model_config(options.model)
    lora = room_for(options.adapter)
    dtype = getattr(torch, "bfloat16" if options.dtype == "auto" else options.dtype)
    rows = options.max_num_seqs
    graphs = graph_config(
        options.graphs,
        Ladder.parse(options.ladder, max(512, rows)) if options.graphs not in ("disabled", "NONE") else None,
        max_num_seqs=rows,
        step_tokens=most_tokens(options.chunk_tokens, rows),
        device="cuda",
        compile=options.compile,
    )
    found = plan_memory(
        config,
        dtype,
        with_cases(graphs, lora),
        profile,
        max_num_seqs=rows,
        max_model_len=model_len(config, options.max_model_len),
        chunk_tokens=options.chunk_tokens,
        memory_fraction=options.memory_fraction,
        lora=lora,
    )
    report: dict[str, Any] = {
        "model": options.model,
        "measured_with": dict(profile.measured_with),
        **found.as_dict(),
        "notes": _notes(graphs, lora) if found.graphs else [],
    }
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_plan(report)
    if found.kv_blocks < 2:
        short = found.taken + 2 * found.block_bytes - found.budget
        more = short / profile.total_bytes
        raising = f"raise the memory fraction by {more:.3f}, or " if options.memory_fraction + more <= 1 else ""
        raise ConfigError(
            f"memory: {in_units(short)} too little for a KV cache of two blocks; {raising}lower max_num_seqs, "
            f"chunk_tokens or the ladder's largest size"
        )


def _notes(graphs: GraphConfig, lora: LoraConfig | None) -> list[str]:
    """What is not in the prediction of the graphs, since the profile is of whole ones of a step as it is."""
    from stepgraph.runtime.config import Compile
    from stepgraph.runtime.keys import SEGMENTED

    segments = any(phase.backend in SEGMENTED for phase in (graphs.prefill, graphs.decode))
    missing = [
        "what compiling changes; the graphs' rows are those of the same ones, not compiled"
        if graphs.compile is not Compile.OFF
        else "",
        "what recording in segments changes; the graphs' rows are those of whole ones, each segment an executable"
        if segments
        else "",
        "what adapters hold in the pool during a step; their launches are in it" if lora else "",
    ]
    return [f"Not in the prediction: {what}." for what in missing if what]


def model_config(model: str) -> ModelConfig:
    from stepgraph.engine.checkpoint import read_model_config
    from stepgraph.engine.random_model import SHAPES
    from stepgraph.runtime import ConfigError

    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return read_model_config(path)
    raise ConfigError(f"model: {model} is no directory, no GGUF file and none of the shapes {', '.join(SHAPES)}")
