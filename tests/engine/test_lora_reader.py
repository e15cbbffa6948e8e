"""Adapters on disk: what is damaged, for another model or not implemented is refused, and slots stay as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.tiny import CONFIG
from safetensors.torch import save_file

from stepgraph.engine.errors import ModelError
from stepgraph.engine.lora import LoraConfig, LoraSlots, read_adapter

PREFIX = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def write(folder: Path, config: object = None, **tensors: torch.Tensor | None) -> Path:
    """tensors: by name, instead of or beside the good ones; None leaves one out."""
    held = {f"{PREFIX}A.weight": torch.ones(4, 32), f"{PREFIX}B.weight": torch.ones(64, 4), **tensors}
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(GOOD if config is None else config), encoding="utf-8")
    return folder


def read(folder: Path, max_rank: int = 16):
    return read_adapter(folder, CONFIG, max_rank)


def test_a_good_one_is_read_and_scaled(tmp_path: Path) -> None:
    adapter = read(write(tmp_path))
    assert list(adapter.weights) == ["model.layers.1.self_attn.q_proj"]
    slots = LoraSlots(CONFIG, LoraConfig(slots=2, max_rank=8), torch.float32, torch.device("cpu"))
    slots.load("mine", adapter)
    pair = slots.layers[1].qkv
    assert pair.ends == (64, 96, 128) and pair.a.shape == (2, 48, 32) and pair.b.shape == (2, 128, 16)
    assert (pair.a[0, :4] == 1).all() and (pair.b[0, :64, :4] == 2).all()  # alpha 8 over r 4
    assert sum(tensor.count_nonzero() for tensor in slots.tensors.values()) == 4 * 32 + 64 * 4


def test_a_slot_is_written_whole(tmp_path: Path) -> None:
    slots = LoraSlots(CONFIG, LoraConfig(slots=1), torch.float32, torch.device("cpu"))
    slots.fill_free(torch.Generator().manual_seed(0))
    assert all(tensor.any() for tensor in slots.tensors.values())
    slots.load("mine", read(write(tmp_path)))
    assert sum(tensor.count_nonzero() for tensor in slots.tensors.values()) == 4 * 32 + 64 * 4
    before = {name: tensor.clone() for name, tensor in slots.tensors.items()}
    slots.fill_free(torch.Generator().manual_seed(1))
    assert all(torch.equal(before[name], tensor) for name, tensor in slots.tensors.items())


def test_what_the_dtype_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    slots = LoraSlots(CONFIG, LoraConfig(slots=1), torch.float16, torch.device("cpu"))
    with pytest.raises(ModelError, match="'mine': model.layers.1.self_attn.q_proj has values that torch"):
        slots.load("mine", read(write(tmp_path, **{f"{PREFIX}B.weight": torch.full((64, 4), 1e30)})))
    assert slots.names == () and not any(tensor.any() for tensor in slots.tensors.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "an object is needed"),
        ({}, "peft_type is None"),
        (GOOD | {"peft_type": "IA3"}, "only LORA"),
        (GOOD | {"r": 0}, "r must be an integer"),
        (GOOD | {"r": True}, "r must be an integer"),
        (GOOD | {"r": 17}, "r is 17; slots have rank 16"),
        (GOOD | {"lora_alpha": "8"}, "lora_alpha must be a number"),
        (GOOD | {"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        (GOOD | {"use_rslora": 1}, "use_rslora must be true or false"),
        (GOOD | {"use_dora": True}, "use_dora is True"),
        (GOOD | {"bias": "all"}, "bias is 'all'"),
        (GOOD | {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        (GOOD | {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (GOOD | {"init_lora_weights": "pissa"}, "changes the base model's"),
    ],
)
def test_a_config_that_is_none_or_asks_for_more_is_refused(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(write(tmp_path, config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{PREFIX}B.weight": None}, "has lora_A and not the other"),
        ({f"{PREFIX}A.weight": None, f"{PREFIX}B.weight": None}, "has no tensors"),
        ({f"{PREFIX}A.weight": torch.ones(5, 32)}, r"F32 \[5, 32\]; this model with r 4 needs \[4, 32\]"),
        ({f"{PREFIX}B.weight": torch.ones(32, 4)}, r"needs \[64, 4\]"),
        ({f"{PREFIX}A.weight": torch.ones(4, 32, dtype=torch.int8)}, "is I8"),
        ({f"{PREFIX}A.weight": torch.full((4, 32), float("nan"))}, "no finite numbers"),
        ({PREFIX.replace(".1.", ".2.") + "A.weight": torch.ones(4, 32)}, "belongs to no projection"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}, "belongs to no projection"),
        ({PREFIX.replace("q_proj", "q_norm") + "A.weight": torch.ones(4, 32)}, "belongs to no projection"),
        ({"\x1b[2J" * 100: torch.ones(1)}, r"'\\x1b\[2J"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, tensors: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        read(write(tmp_path, **tensors))
    assert "\x1b" not in str(refused.value)


def test_files_that_are_not_there_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no directory"):
        read(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="adapter_config.json is missing"):
        read(tmp_path)
    weights = write(tmp_path) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="truncated or not a safetensors file"):
            read(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="has no adapter_model.safetensors"):
        read(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="a pickle only"):
        read(tmp_path)
