"""How large the KV cache is to be: checked before the weights are loaded, settled after the capture."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from stepgraph.engine.budget import FRACTION, MARGIN, Budget, MemoryRow, MemoryTable
from stepgraph.engine.config import ModelConfig
from stepgraph.engine.core import EngineCore
from stepgraph.engine.kv_blocks import BLOCK_SIZE, block_bytes, blocks_for, require_whole
from stepgraph.engine.lora import LoraConfig
from stepgraph.engine.memory_plan import predict_eager, predict_graphs
from stepgraph.engine.memory_rows import WEIGHTS, engine_rows, planned_rows
from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.memory.estimate import LEAST_MARGINAL
from stepgraph.runtime.memory.profile import DeviceProfile, load_profile
from stepgraph.runtime.memory.units import in_units
from stepgraph.runtime.platforms import Platform
from stepgraph.runtime.platforms.cuda_virtual import cuda_virtual_memory, why_no_virtual_memory
from stepgraph.runtime.platforms.virtual import VirtualMemory

_log = logging.getLogger(__name__)

_CACHE = "KV cache"
_CPU_KV_BYTES = 1 << 30
_MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class KVPlan:
    """What is asked for, and where it is to come from.

    budget: of the device; None: on a CPU, which has no memory of its own.
    virtual: the device's virtual memory; None: the cache is allocated at once, before the capture.
    max_num_seqs, rows, tokens: requests that decode at once, and what the step's buffers have room for.
    lora: the adapters that there is to be room for.
    profile: of the device, for the estimate that a cache without virtual memory needs; None: by rule.
    kv_blocks, kv_bytes: the cache's size, of which one may be given; by default whatever is left.

    Raises:
        ConfigError: both sizes, or one that is no whole number.
    """

    budget: Budget | None
    virtual: VirtualMemory | None
    max_num_seqs: int
    rows: int
    tokens: int
    penalties: bool
    lora: LoraConfig | None = None
    profile: DeviceProfile | None = None
    kv_blocks: int | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kv_blocks is not None and self.kv_bytes is not None:
            raise ConfigError("kv_blocks and kv_bytes both say how large the KV cache is; give one of them")
        for name in ("kv_blocks", "kv_bytes"):
            if (given := getattr(self, name)) is not None:
                require_whole(name, given)

    def require_fit(self, config: ModelConfig, dtype: torch.dtype, max_len: int) -> None:
        """Refuse what cannot fit, from shapes alone. To be called before the weights are loaded.

        Raises:
            ConfigError: names what to change, and to what.
        """
        block = block_bytes(config, dtype)
        if self.kv_bytes is not None and self.kv_bytes < 2 * block:
            raise ConfigError(f"kv_bytes is {self.kv_bytes}; two KV blocks, the least, take {2 * block}")
        if self.kv_blocks is not None and self.kv_blocks < 2:
            raise ConfigError(f"kv_blocks is {self.kv_blocks}; at least 2 are needed, since block 0 is reserved")
        if (self._exact(block) or 0) * block > _MOST_BYTES:
            asked = "kv_blocks" if self.kv_bytes is None else "kv_bytes"
            raise ConfigError(f"{asked} is {getattr(self, asked)}; no device has so much memory")
        if self.budget is None:
            return
        needs = self._planned(config, dtype, max_len, self.rows)
        needs[_CACHE] = self._least_blocks(block, max_len) * block
        self._require(needs, block, self._row_bytes(config, dtype, max_len))

    def took(self, name: str) -> None:
        """Add what was taken since the last call to the device's budget."""
        if self.budget is not None:
            self.budget.take(name)

    def num_blocks(self, config: ModelConfig, dtype: torch.dtype, max_len: int, graphs: GraphConfig) -> int:
        """KV blocks that the engine is made with: with virtual memory the most there may be, without it all.

        To be called once the weights and attention's workspaces are there; what follows is estimated where it must be.
        """
        block = block_bytes(config, dtype)
        exact = self._exact(block)
        if exact is not None:
            return exact
        if self.budget is None:
            room = _CPU_KV_BYTES
        elif self.virtual is not None:
            room = self.budget.total
        else:
            room = self.budget.spare - self.estimate(config, dtype, max_len, graphs)
        return max(min(self._useful(max_len), room // block), 2)

    def estimate(self, config: ModelConfig, dtype: torch.dtype, max_len: int, graphs: GraphConfig) -> int:
        """Bytes that the step's buffers, graphs and eager steps will take."""
        buffers = self._planned(config, dtype, max_len, self.rows)
        keys = capture_keys(graphs, max_requests=self.rows, max_tokens=self.tokens)
        eager = predict_eager(config, dtype, max_requests=self.rows, max_tokens=self.tokens, profile=self.profile)
        taken = sum(nbytes for name, nbytes in buffers.items() if name != WEIGHTS)
        return taken + sum(predict_graphs(config, dtype, keys, self.rows, self.profile)) + eager

    def settle(self, core: EngineCore) -> MemoryTable:
        """Once the graphs are captured: measure what eager steps take, and give the cache what is left.

        Raises:
            ConfigError: too little is left; names what to change, and to what.
        """
        kv, budget = core.kv_memory, self.budget
        if budget is None:
            return MemoryTable(tuple(MemoryRow(row.name, row.nbytes) for row in engine_rows(core) if not row.of))
        budget.take("graphs")
        core.run_largest_step()
        budget.take("eager steps, at most", with_cached=True)
        pending = len(core.runner.pending)
        if pending:
            budget.hold("graphs still to come", pending * LEAST_MARGINAL)
            budget.hold("step buffers, copied meanwhile", core.buffers.slab.nbytes)
        if kv.resizable:
            least = self._least_blocks(kv.block_bytes, core.max_model_len) * kv.block_bytes
            row_bytes = self._row_bytes(core.model.config, core.model.dtype, core.max_model_len)
            self._require({_CACHE: least}, kv.block_bytes, row_bytes, held=kv.nbytes)
            exact = self._exact(kv.block_bytes)
            core.resize_kv(kv.blocks_in(budget.spare) if exact is None else exact)
            budget.take(_CACHE, with_cached=True)
        return budget.table()

    def _exact(self, block: int) -> int | None:
        return self.kv_blocks if self.kv_bytes is None else self.kv_bytes // block

    def _useful(self, max_len: int) -> int:
        """Blocks that a full batch of the longest requests holds."""
        return self.max_num_seqs * blocks_for(max_len) + 1

    def _least_blocks(self, block: int, max_len: int) -> int:
        """What is asked for, or room for one request of the greatest length."""
        exact = self._exact(block)
        return blocks_for(max_len) + 1 if exact is None else exact

    def _planned(self, config: ModelConfig, dtype: torch.dtype, max_len: int, rows: int) -> dict[str, int]:
        """Bytes by name of what follows from shapes alone."""
        planned = planned_rows(
            config,
            dtype,
            max_requests=rows,
            max_tokens=self.tokens,
            max_len=max_len,
            penalties=self.penalties,
            lora=self.lora,
        )
        return {row.name: row.nbytes for row in planned}

    def _row_bytes(self, config: ModelConfig, dtype: torch.dtype, max_len: int) -> int:
        """Bytes of the step's buffers that one more request takes."""
        whole, without = (sum(self._planned(config, dtype, max_len, rows).values()) for rows in (self.rows, 0))
        return (whole - without) // self.rows

    def _require(self, needs: dict[str, int], block: int, row_bytes: int, held: int = 0) -> None:
        """needs: bytes by name, the cache's among them. held: bytes of these that are taken already."""
        budget = self.budget
        assert budget is not None
        short = sum(needs.values()) - held - budget.spare
        if short <= 0:
            return
        total, kv = budget.total, needs[_CACHE]
        fraction = math.ceil((budget.allowed + short) / total * 100) / 100
        remedies = [f"raise memory_fraction to {fraction:.2f}" if fraction <= 1 else "free memory of the device"]
        blocks = (kv - short) // block
        asked = next((name for name in ("kv_blocks", "kv_bytes") if getattr(self, name) is not None), "max_model_len")
        unit = {"kv_blocks": 1, "kv_bytes": block, "max_model_len": BLOCK_SIZE}[asked]
        fewer = (blocks - (asked == "max_model_len")) * unit
        remedies.append(f"lower {asked} to {fewer}" if blocks >= 2 else f"lower {asked}, which alone is not enough")
        rows = self.max_num_seqs - math.ceil(short / row_bytes)
        rows = rows // 16 * 16 or rows  # sizes that ladders have
        remedies.append(
            f"lower max_num_seqs to {rows}" if rows > 0 else "lower max_num_seqs, which alone is not enough"
        )
        listed = ", ".join(f"{name} {in_units(nbytes)}" for name, nbytes in needs.items())
        raise ConfigError(
            f"memory: {in_units(short)} too little on {budget.name}: needed are {listed} and a margin of "
            f"{in_units(MARGIN)}, and of memory_fraction {budget.fraction:g} of {in_units(total)} are left "
            f"{in_units(budget.spare + MARGIN)}. One of: {'; '.join(remedies)}"
        )


def kv_plan(platform: Platform, fraction: float | None, **wanted: Any) -> KVPlan:
    """The plan for a device, as it is now: before anything is loaded. wanted: the fields of KVPlan.

    Raises:
        ConfigError: a fraction of a CPU's memory, or as KVPlan.
    """
    device = platform.device
    if platform.memory() is None:
        if fraction is not None:
            raise ConfigError(f"memory_fraction is {fraction}, of a GPU's memory; on {device} give kv_bytes instead")
        return KVPlan(None, None, **wanted)
    reason = why_no_virtual_memory(device)
    if reason is not None:
        wanted["profile"] = _profile_of(device)
        by = "a rule" if wanted["profile"] is None else "the device's profile"
        _log.warning("KV cache: allocated before the capture, of what %s leaves for it, since %s", by, reason)
    virtual = cuda_virtual_memory(device) if reason is None else None
    return KVPlan(Budget(platform, FRACTION if fraction is None else fraction), virtual, **wanted)


def _profile_of(device: torch.device) -> DeviceProfile | None:
    """The package's profile, where it is of this device and measured."""
    try:
        profile = load_profile()
    except ConfigError:
        return None
    return profile if profile.device == torch.cuda.get_device_name(device) else None
