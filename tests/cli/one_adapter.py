"""An adapter of the demo model, for one of its projections."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, PROJECTION = 576, "base_model.model.model.layers.3.self_attn.q_proj.lora_"


def write_one_projection(folder: Path, strength: float = 1.0) -> str:
    """strength: 0 changes no token."""
    folder.mkdir(exist_ok=True)
    noise = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, HIDDEN, generator=noise), torch.randn(HIDDEN, 4, generator=noise) * strength
    save_file({f"{PROJECTION}A.weight": a, f"{PROJECTION}B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
