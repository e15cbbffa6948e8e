"""Random adapters that PEFT writes, and the tokens of a model that PEFT has merged with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, *, seed: int, **changes: Any) -> Path:
    """An adapter of a checkpoint, strong enough to change its tokens. changes: of PEFT's LoraConfig."""
    import peft
    import transformers

    settings = {"r": 8, "lora_alpha": 16, "target_modules": ALL, "task_type": "CAUSAL_LM", **changes}
    model = peft.get_peft_model(_base(transformers, base), peft.LoraConfig(**settings))
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=noise) * 0.2
    model.save_pretrained(folder)
    return folder


def write_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with PEFT's merge of the adapter in its weights."""
    import peft
    import transformers

    merged = peft.PeftModel.from_pretrained(_base(transformers, base), adapter).merge_and_unload()
    merged.save_pretrained(folder)
    return folder


def _base(transformers: Any, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
