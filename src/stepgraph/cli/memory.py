"""`stepgraph memory`: load a model, capture its graphs, and say who has which bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.cli.options import default_device

if TYPE_CHECKING:
    from stepgraph.engine import LLM
    from stepgraph.engine.graphs import Graphs
    from stepgraph.runtime.memory.ledger import MemoryLedger


@dataclass(frozen=True)
class MemoryOptions:
    """The options of the command line; None where the default depends on the machine or the model."""

    model: str | None = None
    device: str | None = None
    graphs: Graphs = "full"
    compile: str = "off"
    ladder: str = "vllm"
    dtype: str = "auto"
    attention: str | None = None
    operations: str | None = None
    adapter: Path | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    profile: Path | None = None
    picture: Path | None = None
    as_json: bool = False


def memory(options: MemoryOptions) -> None:
    """Load, capture, print. Raises StepgraphError where the model or an option cannot work."""
    import torch

    from stepgraph.cli.adapter import load_into, room_for
    from stepgraph.cli.console import ProgressBar
    from stepgraph.cli.memory_view import draw_ledger, print_ledger
    from stepgraph.cli.run import LONGEST_RULE
    from stepgraph.cli.run_report import padded
    from stepgraph.engine import LLM
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.engine.memory_rows import engine_rows
    from stepgraph.measure.picture import require_picture
    from stepgraph.runtime import Ladder
    from stepgraph.runtime.memory.ledger import Captured, make_ledger
    from stepgraph.runtime.memory.profile import load_profile
    from stepgraph.runtime.platforms import platform_for

    if options.picture is not None:
        require_picture(options.picture)  # before the model, which takes a while
    if options.profile is not None:
        load_profile(options.profile)
    device = default_device(options.device)
    platform = platform_for(device)
    lora = room_for(options.adapter)
    start = platform.memory()
    with ProgressBar(quiet=options.as_json) as progress:
        llm = LLM(
            options.model if options.model is not None else demo_model_path(),
            device=device,
            dtype=options.dtype,
            graphs=options.graphs,
            compile=options.compile,
            ladder=Ladder.parse(options.ladder, max(LONGEST_RULE, options.max_num_seqs or 1)),
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            attention=options.attention,
            operations=options.operations,
            lora=lora,
            progress=progress,
        )
    load_into(llm, options.adapter)
    compiled = llm.core.runner.compile_total()
    captured = Captured(llm.core.runner.capture_report)
    ledger = make_ledger([captured], engine_rows(llm.core), platform.memory(), start)
    report = {
        "model": options.model or "demo model SmolLM2-135M-Instruct",
        "device_name": torch.cuda.get_device_name(platform.device) if device != "cpu" else "cpu (tape)",
        "seconds": captured.report.seconds,
        "compile": None if compiled is None else asdict(compiled),
        **ledger.as_dict(),
        "coverage": {
            "requests": padded(llm.core.runner.coverage()),
            "tokens": padded(llm.core.runner.coverage_mixed()),
        },
        "estimates": estimates(ledger, llm, options.profile),
    }
    if options.picture is not None:
        draw_ledger(options.picture, report)
    if options.as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_ledger(report)


def estimates(ledger: MemoryLedger, llm: LLM, profile: Path | None) -> list[dict[str, Any]]:
    """What would have been predicted, beside what the graphs took: pool and driver together, in bytes.

    profile: the device's; without one, the package's, if that is of this device and measured.
    """
    import torch

    from stepgraph.engine.memory_plan import predict_graphs
    from stepgraph.runtime import ConfigError
    from stepgraph.runtime.memory.estimate import TwoSamples, two_sample_estimate
    from stepgraph.runtime.memory.profile import load_profile

    taken: dict[str, list[int]] = {}
    for family, _, cost in ledger.graphs:
        taken.setdefault(family, []).append(cost.pool_bytes + cost.driver_bytes)
    observed = sum(map(sum, taken.values()))
    modes = [TwoSamples(costs[0], costs[1] if len(costs) > 1 else 0, len(costs)) for costs in taken.values()]
    found = [{"name": "two-sample rule", "bytes": two_sample_estimate(modes), "observed_bytes": observed}]
    try:
        known = load_profile(profile)
    except ConfigError:
        if profile is not None:
            raise
        return found
    core = llm.core
    if profile is not None or (core.model.device.type == "cuda" and known.device == torch.cuda.get_device_name()):
        keys = [key for _, key, _ in ledger.graphs]
        pool, driver = predict_graphs(core.model.config, core.model.dtype, keys, core.buffers.max_requests, known)
        found.append({"name": f"profile of {known.device}", "bytes": pool + driver, "observed_bytes": observed})
    return found
