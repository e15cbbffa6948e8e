"""What adapters add to a layer's projections: W x + B A x, for rows that each have an adapter of their own or none."""

from stepgraph.ops.lora.contract import (
    LAYER_LAUNCHES,
    NO_ADAPTERS,
    Adapt,
    LayerAdapters,
    LayerLora,
    LoraPair,
    LoraRows,
    bind_layers,
)
from stepgraph.ops.lora.reference import ReferenceLora

__all__ = [
    "LAYER_LAUNCHES",
    "NO_ADAPTERS",
    "Adapt",
    "LayerAdapters",
    "LayerLora",
    "LoraPair",
    "LoraRows",
    "ReferenceLora",
    "bind_layers",
]
