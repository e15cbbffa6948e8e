"""Reads a Hugging Face model directory: config.json, tokenizer.json and safetensors, in one file or several."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stepgraph.engine.config import ModelConfig, read_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line, read_json
from stepgraph.engine.source import Cut, Source
from stepgraph.engine.tensors import check_tensors
from stepgraph.engine.tokenizer import tokenizer_from_directory

_INDEX = "model.safetensors.index.json"
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")  # a buffer in old checkpoints; it follows from rope_theta
_FLOATS = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_directory(directory: Path, cut_for: Callable[[ModelConfig], Cut] | None = None) -> Source:
    """Opens a model directory. cut_for: by the configuration, which part of each tensor is read; by default all of it.

    Every name and shape is checked before the first tensor is read. Tensors come in the files' dtypes, mapped from
    the files rather than copied. Raises ModelError, naming the file and the tensor.
    """
    config = read_config(directory)
    tokenizer = tokenizer_from_directory(directory, config.eos_token_ids)
    handles, found = {}, {}
    for path, names in _tensor_files(directory).items():
        handle = _open(path)
        held = set(handle.keys())
        for name in names or sorted(held):
            if name not in held:
                raise ModelError(f"{path}: tensor {name} is missing, though {_INDEX} says it is in this file")
            if _IGNORED.fullmatch(name):
                continue
            view = handle.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise ModelError(f"{path}: tensor {name} has dtype {view.get_dtype()}; supported: {', '.join(_FLOATS)}")
            handles[name] = handle
            found[name] = (tuple(view.get_shape()), str(path))
    if config.tie_word_embeddings and _HEAD in found:
        _, file = found.pop(_HEAD)
        if _EMBEDDING in found and not _equal(handles, _HEAD, _EMBEDDING):
            raise ModelError(f"{file}: {_HEAD} differs from {_EMBEDDING}, but config.json ties them")
    check_tensors(config, found, str(directory))
    dtype = _FLOATS[handles[_EMBEDDING].get_slice(_EMBEDDING).get_dtype()]
    if cut_for is None:
        tensors = ((name, handles[name].get_tensor(name)) for name in found)
    else:
        cut = cut_for(config)
        tensors = ((name, cut(name, handles[name].get_slice(name))) for name in found)
    return Source(config, tokenizer, dtype, len(found), tensors)


def _tensor_files(directory: Path) -> dict[Path, list[str]]:
    """File -> the tensors to take from it; an empty list means all."""
    index, single = directory / _INDEX, directory / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return {single: []}
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
            raise ModelError(f"{directory} has pickled weights only, which may run code; convert them to safetensors")
        raise ModelError(f"{directory} has neither model.safetensors nor {_INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must map tensor names to files, got {weight_map!r:.60}")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:  # never a file outside the directory
            raise ModelError(f"{index}: tensor {name} must be in a file of this directory, got {file!r}")
        files.setdefault(directory / file, []).append(name)
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {_INDEX} names it")
    return files


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {one_line(error)}") from None


def _equal(handles: dict[str, safe_open], first: str, second: str) -> bool:
    return torch.equal(handles[first].get_tensor(first), handles[second].get_tensor(second))
