"""`stepgraph verify`: replay every graph of a model's engine against eager, on random batches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepgraph.engine.graphs import Graphs


def verify(*, model: str | None, device: str | None, graphs: Graphs, as_json: bool) -> bool:
    """Print what agrees and what differs; returns whether all agrees.

    Raises:
        StepgraphError: a model or device that cannot work, or no graphs to verify.
    """
    from stepgraph.cli.console import ProgressBar, write
    from stepgraph.engine import LLM
    from stepgraph.engine.demo import demo_model_path
    from stepgraph.runtime.errors import ConfigError

    with ProgressBar(quiet=as_json) as progress:
        llm = LLM(model if model is not None else demo_model_path(), device=device, graphs=graphs, progress=progress)
    if not llm.capture_report.graphs:
        raise ConfigError(f"verify: --graphs {graphs} captures nothing here; choose full, breakable or another mode")
    report = llm.verify()
    write(f"{json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if as_json else report}\n")
    return report.ok
