"""The ladder: which sizes are captured, and which rung a live size is padded to.

A graph replays one recorded size. A live batch takes the smallest captured size that holds it, so the
ladder decides both how much is padded and how much is captured. The rules of vLLM and SGLang are
constructors here, so that their padding can be compared like for like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepgraph.runtime.errors import ConfigError

LARGEST = 65536
"""Sizes above are refused: the size table has an entry for each size, and no batch is that large."""


@dataclass(frozen=True)
class Ladder:
    """Ascending capture sizes with a precomputed size-to-rung table.

    `sizes` are counted in requests (or in tokens, for a token ladder); the unit is the caller's.
    The largest size is the ceiling: `rung` answers None above it.

    Raises:
        ConfigError: no sizes, or sizes that are not positive, ascending and distinct integers.
    """

    sizes: tuple[int, ...]
    rule: str = "explicit"
    _table: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("ladder: no sizes given; name at least one, for example 1,2,4,8")
        for size in self.sizes:
            if isinstance(size, bool) or not isinstance(size, int):
                raise ConfigError(f"ladder: size {size!r} is not a whole number")
            if size <= 0:
                raise ConfigError(f"ladder: size {size} is not positive; sizes start at 1")
            if size > LARGEST:
                raise ConfigError(f"ladder: size {size} is above {LARGEST}, more than any batch")
        repeated = [size for size, count in Counter(self.sizes).items() if count > 1]
        if repeated:
            raise ConfigError(f"ladder: size {min(repeated)} is given more than once; name each size once")
        if list(self.sizes) != sorted(self.sizes):
            raise ConfigError("ladder: sizes must ascend; Ladder.explicit() sorts them")
        table: list[int] = [0]
        for size in self.sizes:
            table.extend([size] * (size + 1 - len(table)))
        object.__setattr__(self, "_table", tuple(table))

    @property
    def max_size(self) -> int:
        return self.sizes[-1]

    def __len__(self) -> int:
        return len(self.sizes)

    def rung(self, size: int) -> int | None:
        """The smallest captured size that holds `size`, or None above the ceiling.

        Raises:
            ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one row, not {size}")
        return self._table[size] if size < len(self._table) else None

    def upto(self, limit: int) -> Ladder:
        """The same rungs cut at `limit`, with `limit` itself as the last one, so that no size up to it falls off."""
        if limit < 1:
            raise ConfigError(f"ladder: a limit of {limit} leaves no size; it must be at least 1")
        if limit >= self.max_size:
            return self
        return Ladder((*(s for s in self.sizes if s < limit), limit), self.rule)

    def in_requests(self, query_len: int) -> Ladder:
        """This ladder of tokens as one of requests that bring `query_len` tokens each.

        Only sizes that such requests fill to the last token are left: 6 tokens are no number of requests of 4 each.

        Raises:
            ConfigError: no size is a multiple of `query_len`, or it is below 1.
        """
        if query_len < 1:
            raise ConfigError(f"ladder: a query length of {query_len}; every request brings at least one token")
        sizes = tuple(size // query_len for size in self.sizes if size % query_len == 0)
        if not sizes:
            raise ConfigError(f"ladder: no size in tokens is a multiple of the query length {query_len}; add some")
        return Ladder(sizes, self.rule)

    @classmethod
    def explicit(cls, sizes: Iterable[int]) -> Ladder:
        """Exactly these sizes, in any order."""
        return cls(tuple(sorted(sizes)))

    @classmethod
    def vllm(cls, max_size: int = 512, *, interactivity: bool = False, append_max: bool = True) -> Ladder:
        """vLLM's rule: 1, 2, 4, then every 8 below 256, then every 16 (51 sizes at 512).

        `interactivity` is its performance mode of that name: every size from 1 to 32 as well (76 at 512).
        append_max: False is what vLLM does with a maximum that a user gave: of 100 it leaves 96 as the last rung.
        Source: vLLM 0.33 `VllmConfig._set_cudagraph_sizes`.
        """
        _require_positive(max_size)
        sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_size + 1, 16)} | ({max_size} if append_max else set())
        if interactivity:
            sizes |= set(range(1, 33))
        return cls(tuple(sorted(s for s in sizes if s <= max_size)), "vllm")

    @classmethod
    def sglang(cls, max_size: int = 256, *, speculative: bool = False) -> Ladder:
        """SGLang's rule: 1, 2, 4, 8, 12, every 8 to 256, every 16 below 512, then every 32 (36 at 256, 52 at 512).

        `speculative` is its denser form for speculative decoding (51 at 256, 67 at 512).
        Source: SGLang 0.5.23 `server_args.py`, which also appends the maximum.
        """
        _require_positive(max_size)
        if speculative:
            parts: list[Iterable[int]] = [range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8)]
            parts.append(range(272, max_size + 1, 16))
        else:
            parts = [(1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, max_size + 1, 32)]
        sizes = {s for part in parts for s in part if s <= max_size} | {max_size}
        return cls(tuple(sorted(sizes)), "sglang")

    @classmethod
    def sglang_prefill(cls, max_size: int, *, append_max: bool = True) -> Ladder:
        """SGLang's rule for prefill, in tokens: strides of 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, 512.

        max_size: by default the chunk size, the most tokens that a step has (42 sizes at 2048).
        append_max: False is what SGLang does: of 5000 it leaves 4608 as the last rung.
        Source: SGLang 0.5.23 `server_args.py`.
        """
        _require_positive(max_size)
        strides = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (LARGEST, 512))
        sizes, start = {max_size} if append_max else set(), 0
        for end, stride in strides:
            sizes |= set(range(start + stride, min(end, max_size) + 1, stride))
            start = end
        return cls(tuple(sorted(sizes)), "sglang-prefill")

    @classmethod
    def parse(cls, text: str, max_size: int) -> Ladder:
        """A ladder from the command line: `vllm`, `sglang`, or sizes such as `1,2,4,8`.

        `max_size` bounds the two rules, as `LARGEST` does; explicit sizes stand as given.

        Raises:
            ConfigError: neither a known rule nor whole numbers separated by commas.
        """
        if text == "vllm":
            return cls.vllm(min(max_size, LARGEST))
        if text == "sglang":
            return cls.sglang(min(max_size, LARGEST))
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise ConfigError(f"ladder: {shown!r} is neither vllm, sglang nor sizes such as 1,2,4,8") from None
        return cls.explicit(sizes)


def vllm_default_ceiling(
    max_num_seqs: int, query_len: int = 1, *, blackwell: bool = False, max_num_batched_tokens: int | None = None
) -> int:
    """vLLM's default largest captured size, in tokens: min(max_num_seqs x query_len x 2, 512).

    The 512 is 1024 on data-centre Blackwell (compute capability 10.x); the step's token budget also bounds it.
    Source: vLLM 0.33 `vllm/config/compilation.py`.
    """
    ceiling = min(max_num_seqs * query_len * 2, 1024 if blackwell else 512)
    return ceiling if max_num_batched_tokens is None else min(ceiling, max_num_batched_tokens)


def sglang_default_ceiling(memory_gb: float | None, tensor_parallel: int = 1) -> int:
    """SGLang's default largest captured batch by a GPU's memory in GB (None: unknown) and the tensor parallel size.

    The tier below 60 GB is lower than the one below 35 GB; that inversion is SGLang's own.
    Source: SGLang 0.5.23 `server_args.py`.
    """
    if memory_gb is None:
        return 160
    wide = tensor_parallel >= 4
    if memory_gb < 20:
        return 8
    if memory_gb < 35:
        return 160 if wide else 48
    if memory_gb < 60:
        return 160 if wide else 32
    if memory_gb < 160:
        return 512 if wide else 256
    return 512


def _require_positive(max_size: int) -> None:
    if max_size > LARGEST:
        raise ConfigError(f"ladder: a largest size of {max_size} is above {LARGEST}, more than any batch")
    if max_size < 1:
        raise ConfigError(f"ladder: a largest size of {max_size} leaves nothing to capture; it must be at least 1")
