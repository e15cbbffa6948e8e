"""A decode step of any causal model that transformers can build, with its modules as regions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.regions import region

_LAYER = re.compile(r".*?\.(\d+)(?:\.|$)")  # the first number in a module's path counts the layers
_MOST_STEPS = 64


class HuggingFaceStep:
    """Decodes one token a row, greedily, and feeds it back; what it reads and writes stays where it is.

    directory: config.json is enough; without weights the model has random ones, which launch the same.
    rows: requests. context: tokens before the first step. A step advances them all by one, 64 times at most.

    Raises:
        ModelError: transformers is missing, or it cannot build or run this model.
        ConfigError: the model allows no such context.
    """

    def __init__(self, directory: Path, *, device: str, dtype: torch.dtype, rows: int, context: int) -> None:
        try:
            import transformers
        except ImportError:
            raise ModelError(
                f"{directory} is run by transformers, which is missing: pip install transformers"
            ) from None
        try:
            config = transformers.AutoConfig.from_pretrained(directory)
            _require_length(directory, config, context + _MOST_STEPS)
            if any(directory.glob("*.safetensors")):
                made = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
            else:
                with torch.device(device):
                    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            self.model: Any = made.to(device).eval()
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=context + _MOST_STEPS)
            takes = inspect.signature(self.model.forward).parameters
            self._fixed = {"cache" if "cache" in takes else "past_key_values": cache}  # newer and older transformers
            prompt = torch.ones((rows, context), dtype=torch.int64, device=device)
            with torch.inference_mode():
                self.model(prompt, **self._fixed)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
            raise ModelError(f"{directory}: transformers cannot run it: {one_line(error)}") from None
        self.layers = name_modules(self.model)
        self._tokens = torch.ones((rows, 1), dtype=torch.int64, device=device)
        self._positions = torch.full((rows, 1), context, dtype=torch.int64, device=device)

    def __call__(self) -> dict[str, torch.Tensor]:
        found = self.model(self._tokens, position_ids=self._positions, **self._fixed)
        with region("sampling"):
            self._tokens.copy_(found.logits[:, -1:].argmax(-1))
        with region("advance"):
            self._positions.add_(1)
        return {"tokens": self._tokens}


def name_modules(model: torch.nn.Module) -> int:
    """Open a region around every module: `layers.N/its path within the layer`, or its own name outside the layers.

    Returns how many layers there are. A module that only holds layers opens none.
    """
    layers: set[int] = set()
    holders = {""}
    for path, _ in model.named_modules():
        match = _LAYER.match(path)
        if match:
            layers.add(int(match[1]))
            holds = path[: match.start(1) - 1].split(".")
            holders |= {".".join(holds[: i + 1]) for i in range(len(holds))}
    for path, module in model.named_modules():
        if path not in holders:
            _around(module, _name(path))
    return len(layers)


def _require_length(directory: Path, config: Any, needed: int) -> None:
    most = getattr(config, "max_position_embeddings", needed)
    if needed > most:
        raise ConfigError(f"{directory} allows sequences of {most} tokens; lower the context to {most - _MOST_STEPS}")


def _name(path: str) -> str:
    """Of the region that a module opens inside its parent's."""
    match = _LAYER.match(path)
    if match and match.end() >= len(path):
        return f"layers.{match[1]}"
    return path.rsplit(".", 1)[-1]


def _around(module: torch.nn.Module, name: str) -> None:
    opened: list[region] = []

    def enter(*_: Any) -> None:
        opened.append(region(name))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    hooks: tuple[Callable[..., Any], Callable[..., Any]] = (enter, leave)
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1], always_call=True)
