"""The KV cache's memory: addresses for the largest cache there may be, and memory for the blocks there are now."""

from __future__ import annotations

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.engine.kv_blocks import allocate_cache, block_bytes, blocks_for, cache_shape, require_whole
from stepgraph.engine.scheduler import Scheduler
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.platforms.virtual import VirtualMemory, VirtualRange


class KVMemory:
    """A cache of blocks 0 to `num_blocks` - 1, block 0 the null block.

    With virtual memory it begins with the least that a capture needs, and `resize` maps more or gives it back while
    addresses, and so graphs, stay. Without, all of it is allocated at once, and that is how it stays.

    num_blocks: the most blocks there may be.
    memory: the device's virtual memory.

    Raises:
        ConfigError: more than the device has, or fewer than two blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: VirtualMemory | None = None,
    ) -> None:
        self.block_bytes = block_bytes(config, dtype)
        self.max_blocks = self.num_blocks = num_blocks
        self._range: VirtualRange | None = None
        if memory is None:
            self.cache = allocate_cache(config, num_blocks, dtype, device)
            return
        shape = cache_shape(config, num_blocks)
        try:
            self._range = VirtualRange(memory, num_blocks * self.block_bytes)
        except torch.OutOfMemoryError:
            gib = num_blocks * self.block_bytes / 2**30
            raise ConfigError(
                f"KV cache: no address range of {gib:,.0f} GiB for {num_blocks} blocks on {device}; lower "
                f"max_num_seqs or max_model_len"
            ) from None
        self.num_blocks = 0
        self.resize(min(max(2, memory.granularity // self.block_bytes), num_blocks))
        whole = self._range.tensor()[: num_blocks * self.block_bytes]
        self.cache = whole.view(dtype).view(shape)

    @property
    def resizable(self) -> bool:
        return self._range is not None

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks there are: [num_blocks, layers, 2, block_size, kv_heads, head_dim]. `cache` has addresses for all
        that may come, where only these may be touched."""
        return self.cache[: self.num_blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self.num_blocks * self.block_bytes if self._range is None else self._range.mapped

    def blocks_in(self, nbytes: int) -> int:
        """How many blocks there can be once it takes `nbytes` more."""
        return min((self.nbytes + max(nbytes, 0)) // self.block_bytes, self.max_blocks)

    def require(self, num_blocks: int) -> None:
        """Refuse what `resize` would refuse whatever the device has room for.

        Raises:
            ConfigError: as there, or no whole number.
        """
        require_whole("KV cache: blocks", num_blocks)
        if not 2 <= num_blocks <= self.max_blocks:
            raise ConfigError(f"KV cache: {num_blocks} blocks; there can be 2 to {self.max_blocks}")
        if self._range is None and num_blocks != self.num_blocks:
            raise ConfigError(
                f"KV cache: its {self.num_blocks} blocks were allocated at once, without virtual memory, and stay; "
                f"another size needs a GPU and cuda.bindings"
            )

    def resize(self, num_blocks: int) -> None:
        """Map blocks up to `num_blocks`, or give back those from there on, up to a piece of the range.

        The device is waited for before anything is given back. Nothing may use the blocks that go.

        Raises:
            ConfigError: fewer than two, more than `max_blocks`, more than the device has room for (and nothing has
                changed), or a cache that was allocated at once.
        """
        self.require(num_blocks)
        if self._range is None:
            return
        nbytes = num_blocks * self.block_bytes
        try:
            self._range.grow(nbytes)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"KV cache: {num_blocks} blocks take {(nbytes - self.nbytes) / 2**30:,.2f} GiB more than there are "
                f"now, which the device does not have; it stays at {self.num_blocks} blocks"
            ) from None
        self._range.shrink(nbytes)
        self.num_blocks = num_blocks


def resize(kv: KVMemory, scheduler: Scheduler, num_blocks: int) -> None:
    """Give a scheduler's cache another size. Requests that hold blocks which go are preempted.

    Raises:
        ConfigError: a request under way would not fit any more, or as `KVMemory.resize`; nothing has changed.
    """
    kv.require(num_blocks)
    if num_blocks < kv.num_blocks:
        for request in (*scheduler.rows, *scheduler.prefilling, *scheduler.waiting):
            needed = blocks_for(len(request.prompt) + request.max_tokens)
            if needed >= num_blocks:
                raise ConfigError(
                    f"KV cache: request {request.id}, which is under way, may need {needed} blocks, and {num_blocks} "
                    f"with the null block are too few; keep at least {needed + 1}, or let it end first"
                )
        scheduler.vacate(num_blocks)
        scheduler.pool.shrink(num_blocks)
        kv.resize(num_blocks)
    else:
        kv.resize(num_blocks)
        scheduler.pool.grow(num_blocks)
