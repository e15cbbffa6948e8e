"""Adapters come and go between two steps, while other requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgraph.engine.errors import RequestError
from stepgraph.engine.lora.peft_reader import Adapter
from stepgraph.engine.lora.slots import LoraSlots
from stepgraph.runtime.errors import ConfigError

if TYPE_CHECKING:
    from stepgraph.engine.core import EngineCore


def load_adapter(core: EngineCore, name: str, adapter: Adapter) -> None:
    """Write an adapter into the slot that has its name, or into a free one. Graphs stay.

    Raises:
        ConfigError: the engine has no slots. RequestError: requests under way use the one with this name, or
            it is no name.
        ModelError: every slot is taken, or values that do not fit. ReplayError: a step is under way.
    """
    if not isinstance(name, str) or not name:
        raise RequestError(f"an adapter's name is a text, not {name!r:.80}")
    slots = _idle_slots(core, name)
    with core.runner.pool.alone():
        slots.load(name, adapter)
        core.buffers.platform.synchronize()  # the next step may come on any stream


def unload_adapter(core: EngineCore, name: str) -> None:
    """Free an adapter's slot.

    Raises:
        ConfigError: the engine has no slots. RequestError: requests under way use it, or it is not loaded.
    """
    _idle_slots(core, name).unload(name)


def require_slots(core: EngineCore) -> LoraSlots:
    """Raises ConfigError where the engine has no slots."""
    if core.lora is None:
        raise ConfigError("there is no room for adapters; start the engine with lora=LoraConfig(...)")
    return core.lora


def _idle_slots(core: EngineCore, name: str) -> LoraSlots:
    slots, scheduler = require_slots(core), core.scheduler
    queued = (*scheduler.rows, *scheduler.prefilling, *scheduler.waiting)
    using = sum(request.adapter == name for request in queued)
    if using:
        raise RequestError(f"adapter {name!r:.80}: {using} requests under way use it; let them end first")
    return slots
