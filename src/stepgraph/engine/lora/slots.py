"""Fixed slots for adapters: their memory stays where graphs read it, and what lies in it changes while they serve."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.errors import ModelError, RequestError
from stepgraph.engine.lora.config import LoraConfig
from stepgraph.engine.lora.peft_reader import Adapter
from stepgraph.ops.lora import LayerLora, LoraPair

_ATTENTION, _MLP = "self_attn.{}_proj", "mlp.{}_proj"


class LoraSlots:
    """Adapters by name, and the weights of all of them.

    tensors: by name, each of all layers, [layers, slots, parts x rank, in] for A and [layers, slots, out, rank] for B.
    layers: views of them. Slots that nobody has hold anything finite.
    """

    def __init__(self, model: ModelConfig, config: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._by_name: dict[str, int] = {}
        self._joined = _joined(model)
        with torch.inference_mode(False):  # inference tensors could not be written outside that mode
            self.tensors = {
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, shape in lora_shapes(model, config).items()
            }
        self.layers = [
            LayerLora(**{name: self._pair(name, index) for name in self._joined}) for index in range(model.num_layers)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters that are loaded, the one loaded first in front."""
        return tuple(self._by_name)

    def slot(self, name: str) -> int:
        """Where an adapter lies.

        Raises:
            RequestError: it is not loaded.
        """
        if not isinstance(name, str) or name not in self._by_name:
            loaded = ", ".join(self._by_name) or "none"
            raise RequestError(f"adapter {name!r:.80} is not loaded; loaded are: {loaded}")
        return self._by_name[name]

    @torch.no_grad()
    def load(self, name: str, adapter: Adapter) -> None:
        """Write an adapter into the slot that has its name, or into a free one. Nobody may be using it.

        Raises:
            ModelError: every slot is taken, or values that the slots' dtype cannot hold; nothing has changed.
        """
        free = [slot for slot in range(self.config.slots) if slot not in self._by_name.values()]
        if name not in self._by_name and not free:
            raise ModelError(
                f"adapter {name!r:.80}: all {self.config.slots} slots are taken, by {', '.join(self._by_name)}; "
                f"unload one, or start with more slots"
            )
        weights = {
            projection: self._stored(name, projection, pair, adapter) for projection, pair in adapter.weights.items()
        }
        slot = self._by_name.setdefault(name, free[0] if free else 0)
        for tensor in self.tensors.values():
            tensor[:, slot] = 0
        for index, layer in enumerate(self.layers):
            for joined, projections in self._joined.items():
                pair, start = getattr(layer, joined), 0
                for part, (projection, stop) in enumerate(zip(projections, pair.ends, strict=True)):
                    if (found := weights.get(f"model.layers.{index}.{projection}")) is not None:
                        a, b = found
                        pair.a[slot, part * pair.rank :][: a.shape[0]].copy_(a)
                        pair.b[slot, start:stop, : b.shape[1]].copy_(b)
                    start = stop

    def unload(self, name: str) -> None:
        """Free a slot. Nobody may be using it.

        Raises:
            RequestError: it is not loaded.
        """
        self.slot(name)
        del self._by_name[name]

    @torch.no_grad()
    def fill_free(self, generator: torch.Generator) -> None:
        """Noise into the slots that nobody has, for steps that are to tell one slot from another."""
        for slot in set(range(self.config.slots)) - set(self._by_name.values()):
            for tensor in self.tensors.values():
                scale = tensor.shape[-1] ** -0.5
                tensor[:, slot] = torch.randn(tensor[:, slot].shape, generator=generator) * scale

    def _pair(self, name: str, index: int) -> LoraPair:
        ends, total = [], 0
        for size in self._joined[name].values():
            total += size
            ends.append(total)
        return LoraPair(self.tensors[f"{name}.a"][index], self.tensors[f"{name}.b"][index], tuple(ends))

    def _stored(
        self, name: str, projection: str, pair: tuple[torch.Tensor, torch.Tensor], adapter: Adapter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the slots' dtype, on the CPU, the scale in B."""
        dtype = self.layers[0].qkv.a.dtype
        a, b = pair[0].to(dtype), (pair[1].float() * adapter.config.scale).to(dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelError(f"adapter {name!r:.80}: {projection} has values that {dtype} cannot hold")
        return a, b


def lora_shapes(model: ModelConfig, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the slots, by name."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    widths = {"qkv": hidden, "attention_out": queries, "gate_up": hidden, "down": model.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projections in _joined(model).items():
        front = (model.num_layers, config.slots)
        shapes[f"{name}.a"] = (*front, len(projections) * config.rank, widths[name])
        shapes[f"{name}.b"] = (*front, sum(projections.values()), config.rank)
    return shapes


def _joined(model: ModelConfig) -> dict[str, Mapping[str, int]]:
    """By joined projection, Hugging Face's names of its parts in order, and how many columns each puts out."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "qkv": dict(zip(map(_ATTENTION.format, "qkv"), (queries, keys, keys), strict=True)),
        "attention_out": {_ATTENTION.format("o"): hidden},
        "gate_up": {_MLP.format("gate"): inner, _MLP.format("up"): inner},
        "down": {_MLP.format("down"): hidden},
    }
