"""Keeps dequantised weights for the next start: one safetensors file for each GGUF file and dtype.

A file is named after the content it came from, written beside its place and renamed into it, and checked in full
before it is used: whatever is not exactly what was written is ignored and written again.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.fields import one_line
from stepgraph.engine.tensors import check_tensors
from stepgraph.engine.tokenizer import Tokenizer
from stepgraph.runtime.whole_file import beside

_FORMAT = "2"  # raise it when the content for the same GGUF file changes
_ABANDONED_S = 24 * 3600.0
_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Where this platform keeps files that can be made again: $XDG_CACHE_HOME/stepgraph or its equivalent."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepgraph"


def cache_file(cache_dir: Path, source: Path, dtype: torch.dtype) -> Path:
    """The cache's path for the content of `source` in `dtype`; reads the whole source."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_dir / f"{digest[:40]}-{str(dtype).removeprefix('torch.')}-v{_FORMAT}.safetensors"


def read_cache(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, torch.Tensor]] | None:
    """What `write_cache` stored, its tensors mapped from the file on the CPU; None when absent or damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            description = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if description.pop("checksum") != _text_checksum(description):
            raise ValueError("the description's checksum does not match")
        if json.loads(description["checksums"]) != _checksums(tensors):
            raise ValueError("a tensor's checksum does not match")
        fields = json.loads(description["config"])
        for key, value in fields.items():
            fields[key] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        config = ModelConfig(**fields)
        check_tensors(config, {name: (tuple(t.shape), str(path)) for name, t in tensors.items()}, str(path))
        return config, Tokenizer.from_dict(json.loads(description["tokenizer"])), tensors
    except Exception as error:  # a damaged file may fail anywhere above; every failure means the same: make it again
        _log.warning("the weights cache %s is damaged and will be written again: %s", path, one_line(error))
        return None


def write_cache(path: Path, config: ModelConfig, tokenizer: Tokenizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Stores CPU tensors. A cache that cannot be written costs the next start time and nothing else: it only warns."""
    description = {
        "config": json.dumps(asdict(config)),
        "tokenizer": json.dumps(tokenizer.to_dict(), ensure_ascii=False),
        "checksums": json.dumps(_checksums(tensors)),
    }
    description["checksum"] = _text_checksum(description)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        with beside(path, mode=0o600) as unfinished:
            save_file(dict(tensors), unfinished, metadata=description)
    except (OSError, SafetensorError) as error:
        _log.warning("the weights cache %s cannot be written: %s", path, one_line(error))


def _checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    def checksum(tensor: torch.Tensor) -> int:
        return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # crc32 runs without the interpreter's lock
        return dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))


def _text_checksum(description: Mapping[str, str]) -> str:
    return str(zlib.crc32(json.dumps(dict(description), sort_keys=True).encode()))


def _remove_abandoned(directory: Path) -> None:
    """Removes what a process that was killed while writing left behind."""
    for file in directory.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                file.unlink()
