"""CUDA graphs for PyTorch decode loops: captured, padded, dispatched, and accounted for.

The public names are loaded on first use, so that importing the package loads neither torch nor the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepgraph.engine import LLM, LoraConfig, SamplingParams
    from stepgraph.runtime import BatchDescriptor, GraphConfig, GraphRunner, Ladder, PaddingPolicy, Slot, StaticBuffers

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BatchDescriptor",
    "GraphConfig",
    "GraphRunner",
    "Ladder",
    "LoraConfig",
    "PaddingPolicy",
    "SamplingParams",
    "Slot",
    "StaticBuffers",
    "__version__",
]

_ENGINE_NAMES = {"LLM", "LoraConfig", "SamplingParams"}


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(".engine" if name in _ENGINE_NAMES else ".runtime", __name__)
    value = globals()[name] = getattr(room, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
