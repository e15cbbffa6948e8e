"""Reads an adapter that PEFT saved: adapter_config.json and adapter_model.safetensors. Nothing of it is trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import flag, integer, one_line, positive, read_json
from stepgraph.engine.tensors import expected_tensors

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(model\.layers\.\d+\.\w+\.\w+)\.lora_([AB])\.weight", re.ASCII)
_PROJECTIONS = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight", re.ASCII)
_DTYPES = ("F32", "F16", "BF16")
# Initial values that leave the base model's weights as they are: the others are saved as a difference to changed ones.
_PLAIN_INIT = (True, False, "gaussian", "eva", "orthogonal")
# What would change the arithmetic, and is not implemented.
_REFUSED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)


@dataclass(frozen=True)
class AdapterConfig:
    """rank: of every projection that the adapter has. scale: of B A."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """weights: by projection, such as "model.layers.0.self_attn.q_proj", (A [rank, in], B [out, rank]) as stored."""

    config: AdapterConfig
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Raises ModelError where it is missing, damaged, or asks for what is not implemented."""
    path = directory / _CONFIG
    fields = read_json(path, "the directory of an adapter")
    if fields.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {fields.get('peft_type')!r:.60}; only LORA is applied")
    for name in _REFUSED:
        if fields.get(name):
            raise ModelError(f"{path}: {name} is {fields[name]!r:.60}; adapters with it are not applied")
    if fields.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias is {fields['bias']!r:.60}; only adapters without biases are applied")
    if fields.get("init_lora_weights", True) not in _PLAIN_INIT:
        raise ModelError(
            f"{path}: init_lora_weights is {fields['init_lora_weights']!r:.60}, which changes the base model's "
            f"weights; save it converted to a plain adapter"
        )
    rank = integer(fields, "r", str(path), high=1 << 16)
    alpha = positive(fields, "lora_alpha", str(path), 8.0)
    return AdapterConfig(rank, alpha / (math.sqrt(rank) if flag(fields, "use_rslora", str(path)) else rank))


def read_adapter(directory: str | Path, model: ModelConfig, max_rank: int) -> Adapter:
    """An adapter for a model, with every name and shape checked before a tensor is read.

    max_rank: the highest that there is room for. Raises ModelError, naming the file and what is wrong in it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory} is no directory; give the one that has {_CONFIG} and {_WEIGHTS}")
    config = read_adapter_config(directory)
    if config.rank > max_rank:
        raise ModelError(f"{directory / _CONFIG}: r is {config.rank}; slots have rank {max_rank}; raise max_rank")
    path = directory / _WEIGHTS
    if not path.is_file():
        pickled = " has a pickle only, which may run code; save it as safetensors"
        raise ModelError(f"{directory}{pickled if any(directory.glob('*.bin')) else f' has no {_WEIGHTS}'}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            shapes = {name: shape for name, shape in expected_tensors(model).items() if _PROJECTIONS.fullmatch(name)}
            names = {name: _projection(name, file, str(path), shapes, config.rank) for name in file.keys()}  # noqa: SIM118
            found: dict[str, dict[str, torch.Tensor]] = {}
            for name, (projection, side) in names.items():
                found.setdefault(projection, {})[side] = _finite(file.get_tensor(name), name, str(path))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {one_line(error)}") from None
    half = next((name for name, sides in found.items() if len(sides) < 2), None)
    if half is not None or not found:
        what = "has no tensors" if half is None else f"{half} has lora_{next(iter(found[half]))} and not the other"
        raise ModelError(f"{path}: {what}")
    return Adapter(config, {name: (sides["A"], sides["B"]) for name, sides in found.items()})


def _projection(name: str, file: Any, path: str, shapes: Mapping[str, tuple[int, ...]], rank: int) -> tuple[str, str]:
    """The projection that a tensor belongs to, and whether it is its A or B. shapes: [out, in] of those there are."""
    match = _NAME.fullmatch(name)
    shape = shapes.get(f"{match[1]}.weight") if match else None
    if match is None or shape is None:
        raise ModelError(f"{path}: tensor {name!r:.120} belongs to no projection of this model's layers")
    view, side = file.get_slice(name), match[2]
    wanted = (rank, shape[1]) if side == "A" else (shape[0], rank)
    if tuple(view.get_shape()) != wanted or view.get_dtype() not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} is {view.get_dtype()} {list(view.get_shape())}; this model with r {rank} needs "
            f"{list(wanted)} of {', '.join(_DTYPES)}"
        )
    return match[1], side


def _finite(tensor: torch.Tensor, name: str, path: str) -> torch.Tensor:
    if not tensor.isfinite().all():
        raise ModelError(f"{path}: tensor {name} has values that are no finite numbers")
    return tensor
