"""Compiled kernels on disk, so that a restart does not compile them again."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stepgraph.runtime.whole_file import beside

_DIGEST = 32  # bytes in front of the content, which tell whether it is whole
_log = logging.getLogger(__name__)


def kernel_cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/stepgraph/kernels, or the same in ~/.cache.

    Raises:
        RuntimeError: there is no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepgraph" / "kernels"


def cached(parts: Sequence[str], compile_it: Callable[[], bytes], folder: Path | None = None) -> bytes:
    """What `compile_it` returns; or what it returned for the same `parts` before, in this process or another.

    parts: everything that the result depends on. folder: by default `kernel_cache_dir()`. A cache that cannot be read
    or written costs time and nothing else.
    """
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    try:
        path = (folder or kernel_cache_dir()) / f"{name}.cubin"
        whole = path.read_bytes() if path.exists() else b""
    except (OSError, RuntimeError) as error:
        _log.warning("the kernel cache cannot be used: %s", error)
        return compile_it()
    content = whole[_DIGEST:]
    if whole and hashlib.sha256(content).digest() == whole[:_DIGEST]:
        return content
    content = compile_it()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path, mode=0o600) as unfinished:  # another process may write the same file now
            unfinished.write_bytes(hashlib.sha256(content).digest() + content)
    except OSError as error:
        _log.warning("the kernel cache %s cannot be written: %s", path, error)
    return content
