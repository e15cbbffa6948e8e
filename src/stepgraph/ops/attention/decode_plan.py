"""Into how many programs a paged decode is cut: fixed at the capture, from what the host knows by then."""

from dataclasses import dataclass

from stepgraph.ops.attention.contract import AttentionShape
from stepgraph.runtime.errors import ConfigError

_MOST_FORCED_SPLITS = 4


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is built and cut. Every choice is right; they differ in speed.

    tile_bytes: bytes of keys that a program reads at a time, and as many of values; a power of two.
    num_warps: warps of a program.
    num_stages: 1 holds the next tile in registers while the present one is weighed; with more, that many less one are
        on their way to shared memory.
    programs_per_sm: programs that one multiprocessor is to have of the smaller batches.
    min_chunk: tokens that are worth a program of their own; a multiple of the block size.
    max_chunk: tokens of the longest row that one program should not exceed, however large the batch.
    pdl: programmatic dependent launch (compute capability 9.0 or more): the kernel starts while the one in front of it
        ends. It then reads lengths, block tables and the keys and values of older tokens before that one has ended. So
        a kernel that itself lets the next one start early must not write those; any other may.

    Raises ConfigError where a size cannot work.
    """

    tile_bytes: int = 16 << 10
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_chunk: int = 128
    max_chunk: int = 4096
    pdl: bool = False

    def __post_init__(self) -> None:
        sizes = (self.tile_bytes, self.num_warps, self.num_stages, self.programs_per_sm, self.min_chunk)
        if min(sizes) < 1 or self.max_chunk < self.min_chunk:
            raise ConfigError(f"decode: every size must be at least 1, and max_chunk at least min_chunk, got {self}")
        if self.tile_bytes & (self.tile_bytes - 1) or self.num_warps & (self.num_warps - 1):
            raise ConfigError(f"decode: tile_bytes and num_warps must be powers of two, got {self}")

    def tile(self, head_bytes: int) -> int:
        """Tokens of a tile, for heads padded to `head_bytes` (a power of two): 16 to 128."""
        return min(128, max(16, self.tile_bytes // head_bytes))


TRITON = DecodeConfig(num_stages=1, min_chunk=64)
"""Of Triton's kernel, as it was fastest on an H200 (benchmarks/h200_attention.py)."""


@dataclass(frozen=True)
class SplitPlan:
    """How many programs share one row and KV head, by the number of rows alone: no length is part of it.

    A row cuts what it really has into equal chunks, at most one for each of its programs. Where there are fewer, the
    programs left over exit at once; where there is one, it writes the result itself.

    max_rows: the largest batch. max_len: the longest row; longer ones come out right too, in longer chunks.
    """

    shape: AttentionShape
    config: DecodeConfig
    num_sms: int
    max_rows: int
    max_len: int

    def __post_init__(self) -> None:
        if min(self.num_sms, self.max_rows, self.max_len) < 1:
            raise ConfigError(f"decode: num_sms, max_rows and max_len must be at least 1, got {self}")
        if self.config.min_chunk % self.shape.block_size:
            raise ConfigError(
                f"decode: min_chunk {self.config.min_chunk} is not a multiple of the block size {self.shape.block_size}"
            )

    def splits(self, rows: int) -> int:
        """Programs for each row and KV head in a batch of `rows`.

        As many as run at once, so that no second, emptier wave follows the first. More only for the sake of a long row
        among many, and then few: of every program that short rows leave over, the start is paid.
        """
        config = self.config
        longest = min(self.max_len, self.shape.window or self.max_len)
        at_once = self.num_sms * config.programs_per_sm // (rows * self.shape.num_kv_heads)
        forced = min(_MOST_FORCED_SPLITS, -(-longest // config.max_chunk))
        return min(max(1, at_once, forced), -(-longest // config.min_chunk))

    @property
    def capacity(self) -> int:
        """Partial results, counted in rows x splits, that the workspace must hold for any batch up to `max_rows`."""
        needed = ((rows, self.splits(rows)) for rows in range(1, self.max_rows + 1))
        return max((rows * splits for rows, splits in needed if splits > 1), default=0)

    def workspace_bytes(self, writers: int = 1) -> int:
        """Of the workspace, with a level and a count for each writer of a part."""
        shape = self.shape
        parts = self.capacity * shape.num_heads * (shape.head_dim + writers)
        return 4 * (parts + self.max_rows * shape.num_kv_heads * writers)
