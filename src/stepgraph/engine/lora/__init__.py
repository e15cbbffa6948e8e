"""LoRA adapters: read from PEFT's files, held in fixed slots, applied row by row."""

from stepgraph.engine.lora.config import LoraConfig, with_cases
from stepgraph.engine.lora.peft_reader import Adapter, read_adapter, read_adapter_config
from stepgraph.engine.lora.slots import LoraSlots

__all__ = ["Adapter", "LoraConfig", "LoraSlots", "read_adapter", "read_adapter_config", "with_cases"]
