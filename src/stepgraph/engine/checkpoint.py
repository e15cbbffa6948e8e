"""Loads a model: a Hugging Face directory, a model of the Hugging Face hub, or a GGUF file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stepgraph.engine.config import ModelConfig, read_config
from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line
from stepgraph.engine.gguf_config import read_gguf_config
from stepgraph.engine.gguf_file import open_gguf
from stepgraph.engine.gguf_loader import gguf_dtype, load_gguf
from stepgraph.engine.hub import local_path
from stepgraph.engine.safetensors_loader import load_directory
from stepgraph.engine.source import Cut, Source
from stepgraph.engine.tokenizer import Tokenizer
from stepgraph.engine.weights_cache import cache_file, default_cache_dir, read_cache, write_cache
from stepgraph.runtime.progress import Progress

Check = Callable[[ModelConfig, torch.dtype], None]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    weights: Hugging Face's names -> tensors of one dtype on one device. On the CPU they may be mapped from a
    file, privately: writing to them does not change it. "lm_head.weight" is absent when the head is tied.
    from_cache: the weights were dequantised by an earlier start.
    """

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    from_cache: bool = False


def load_checkpoint(
    model: str | Path,
    *,
    dtype: torch.dtype | None,
    device: str | torch.device,
    cache_dir: str | Path | None = None,
    check: Check | None = None,
    progress: Progress | None = None,
    cut_for: Callable[[ModelConfig], Cut] | None = None,
) -> Checkpoint:
    """Loads a model: a Hugging Face directory (safetensors), a GGUF file, or the hub's id of one ("org/name").

    dtype: float32, bfloat16 or float16; the weights are converted as they are placed, one tensor at a time. None: as
    they are stored, bfloat16 where they are quantised. cache_dir: where a GGUF file's dequantised weights are kept for
    the next start; None is the platform's cache directory. check: called with the configuration and the weights' dtype
    before the first tensor is placed on the device; may raise what it likes. progress: called as (done, total, tensor
    name) after each tensor. cut_for: by the configuration, which part of each tensor is wanted; by default all of it.
    Raises ModelError, in one line that names the file, when something is missing, damaged or not supported.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype} is not supported; use one of: {', '.join(str(d) for d in _DTYPES)}")
    path = local_path(model)
    from_cache = False
    if path.is_dir():
        source, cut = load_directory(path, cut_for), None
    else:
        _refuse_other_files(path)
        cache = Path(cache_dir or default_cache_dir())
        source, from_cache = _gguf_through_cache(path, dtype or gguf_dtype(path), cache)
        cut = None if cut_for is None else cut_for(source.config)
    if check is not None:
        check(source.config, dtype or source.dtype)
    weights = {}
    for done, (name, tensor) in enumerate(source.tensors, 1):
        weights[name] = _place(name, tensor if cut is None else cut(name, tensor), dtype or source.dtype, device)
        if progress is not None:
            progress(done, source.num_tensors, name)
    return Checkpoint(source.config, weights, source.tokenizer, from_cache)


def read_model_config(model: str | Path) -> ModelConfig:
    """The configuration alone, of a model as `load_checkpoint` takes it. Raises ModelError as that does."""
    path = local_path(model)
    if path.is_dir():
        return read_config(path)
    _refuse_other_files(path)
    return read_gguf_config(open_gguf(path))[0]


def _refuse_other_files(path: Path) -> None:
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is only weights; give the directory that also has config.json and tokenizer.json")
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise ModelError(f"{path} is a pickle, which may run code; give a safetensors directory or a .gguf file")


def _gguf_through_cache(path: Path, dtype: torch.dtype, cache_dir: Path) -> tuple[Source, bool]:
    try:
        cached_path = cache_file(cache_dir, path, dtype)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from None
    cached = read_cache(cached_path)
    if cached is not None:
        config, tokenizer, weights = cached
        return Source(config, tokenizer, dtype, len(weights), iter(weights.items())), True
    source = load_gguf(path, dtype)

    def kept() -> Iterator[tuple[str, torch.Tensor]]:
        host = {}
        for name, tensor in source.tensors:
            host[name] = tensor
            yield name, tensor
        write_cache(cached_path, source.config, source.tokenizer, host)

    return replace(source, tensors=kept()), False


def _place(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    try:
        return tensor.to(device=device, dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"tensor {name} does not fit on {device} ({one_line(error)}); use a smaller model, dtype or a freer device"
        ) from None
