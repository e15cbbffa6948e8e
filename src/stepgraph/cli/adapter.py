"""`--adapter`: one LoRA adapter, which every request of a command has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepgraph.engine import LLM, LoraConfig


def room_for(adapter: Path | None) -> LoraConfig | None:
    """What an engine must be started with; no graph is for batches without the adapter.

    Raises:
        ModelError: the adapter's configuration is missing, damaged, or asks for what is not implemented.
    """
    from stepgraph.engine import LoraConfig
    from stepgraph.engine.lora import read_adapter_config

    return None if adapter is None else LoraConfig(slots=1, max_rank=read_adapter_config(adapter).rank, cases=(1,))


def load_into(llm: LLM, adapter: Path | None) -> None:
    """Raises ModelError where it does not fit the model."""
    if adapter is not None:
        llm.load_adapter(str(adapter), adapter)
