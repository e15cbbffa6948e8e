"""Finds a model's files: those at a local path, or those of the Hugging Face hub, fetched and cached by its library."""

import re
from pathlib import Path

from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_FILE = re.compile(r".*\.(gguf|safetensors|bin|pt|pth|pkl)")
# What the engine reads, and nothing else: no pickles, and no second copy of the weights in another format.
_PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no path here can be one of the hub's."""
    return _HUB_ID.fullmatch(name) is not None and _FILE.fullmatch(name) is None


def local_path(model: str | Path) -> Path:
    """Where the files of `model` lie: a path, or an id of the hub ("org/name"), which is fetched if it has to be.

    A path that exists is never looked for on the hub, and a `Path` is never an id. Raises ModelError when there is
    nothing, and when the hub does not give it.
    """
    path = Path(model)
    if path.exists():
        return path
    if isinstance(model, Path) or not is_hub_id(model):
        raise ModelError(f"{path} does not exist; give a model directory, a .gguf file, or a hub id such as org/name")
    from huggingface_hub import snapshot_download  # takes a third of a second, and few starts need it

    try:
        return Path(snapshot_download(model, allow_patterns=list(_PATTERNS)))
    except Exception as error:  # its own errors, its HTTP client's, and the system's: all mean that there is no model
        raise ModelError(
            f"{model} is no local path, and the Hugging Face hub does not give it ({type(error).__name__}): "
            f"{one_line(error)}"
        ) from None
