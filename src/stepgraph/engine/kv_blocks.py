"""The paged KV cache's blocks: who holds which. Block 0 is the null block and belongs to nobody."""

from __future__ import annotations

import torch

from stepgraph.engine.config import ModelConfig
from stepgraph.runtime.errors import ConfigError

BLOCK_SIZE = 16  # tokens


def require_whole(what: str, value: object) -> None:
    """Raises ConfigError: something else than a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{what}: {value!r} is not a whole number")


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return config.num_layers * 2 * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize


def cache_shape(config: ModelConfig, num_blocks: int) -> tuple[int, ...]:
    """(num_blocks, layers, 2, block_size, kv_heads, head_dim). Blocks lead, so that a cache can grow.

    Raises:
        ConfigError: fewer than two blocks.
    """
    if num_blocks < 2:
        raise ConfigError(f"KV cache: {num_blocks} blocks; at least 2 are needed, since block 0 is reserved")
    return (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)


def allocate_cache(config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of `cache_shape`, zeroed.

    Raises:
        ConfigError: more than the device has, or fewer than two blocks.
    """
    shape = cache_shape(config, num_blocks)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError:  # out of memory, in the words of the device, or a size beyond counting
        gib = num_blocks * block_bytes(config, dtype) / 2**30
        raise ConfigError(
            f"KV cache: {num_blocks} blocks take {gib:,.1f} GiB, which {device} does not have; give it fewer blocks "
            f"(kv_blocks), or lower max_num_seqs or max_model_len"
        ) from None


class BlockPool:
    """Free blocks, handed out last returned first, so that warm memory is used again.

    num_blocks: the null block included, which is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.capacity = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) if there are not that many."""
        if count > len(self._free):
            return None
        kept = len(self._free) - count
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))

    def grow(self, num_blocks: int) -> None:
        """Take in the blocks up to `num_blocks`; those there were go first."""
        self._free[:0] = range(num_blocks - 1, self.capacity, -1)
        self.capacity = num_blocks - 1

    def shrink(self, num_blocks: int) -> None:
        """Let the blocks from `num_blocks` on go.

        Raises:
            ValueError: some of them are handed out; nothing has changed.
        """
        kept = [block for block in self._free if block < num_blocks]
        held = self.capacity + 1 - num_blocks - (len(self._free) - len(kept))
        if held:
            raise ValueError(f"{held} of the blocks from {num_blocks} on are handed out")
        self._free, self.capacity = kept, num_blocks - 1
