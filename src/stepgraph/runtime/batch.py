"""The key under which a step is captured and looked up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepgraph.runtime.errors import ConfigError


@dataclass(frozen=True)
class BatchDescriptor:
    """A live batch, or the key of a recorded step: what the recording is specialised on.

    num_tokens: rows of token-shaped tensors.
    num_reqs: requests. None in a relaxed key, which holds for any number of them up to its request slots.
    query_len: tokens that each request brings (1 in plain decode). None where requests differ, and in a relaxed key.
    num_loras: active adapters.

    A uniform batch has a query_len, and num_tokens is then num_reqs x query_len: the two units are never mixed.

    Raises:
        ConfigError: counts that contradict each other.
    """

    num_tokens: int
    num_reqs: int | None = None
    query_len: int | None = None
    num_loras: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_tokens, 1 if self.num_reqs is None else self.num_reqs, self.query_len or 1)
        if min(counts) < 1 or self.query_len == 0 or self.num_loras < 0:
            raise ConfigError(f"{self}: counts must be positive")
        if self.query_len is not None:
            if self.num_reqs is None or self.num_tokens != self.num_reqs * self.query_len:
                raise ConfigError(
                    f"{self}: {self.num_tokens} tokens are not {self.num_reqs} requests x {self.query_len} tokens each"
                )
        elif self.num_reqs is not None and self.num_reqs > self.num_tokens:
            raise ConfigError(f"{self}: {self.num_reqs} requests need at least a token each")

    @classmethod
    def decode(cls, num_reqs: int, query_len: int = 1, num_loras: int = 0) -> BatchDescriptor:
        """A uniform batch: every request brings `query_len` tokens."""
        return cls(num_reqs * query_len, num_reqs, query_len, num_loras)

    @classmethod
    def mixed(cls, num_tokens: int, num_reqs: int, num_loras: int = 0) -> BatchDescriptor:
        """A live batch whose requests bring different numbers of tokens: prefill, or prefill beside decode."""
        return cls(num_tokens, num_reqs, None, num_loras)

    @classmethod
    def relaxed(cls, num_tokens: int, num_loras: int = 0) -> BatchDescriptor:
        """The key of a recording that depends on the token count alone."""
        return cls(num_tokens, None, None, num_loras)

    @property
    def is_uniform(self) -> bool:
        return self.query_len is not None

    @property
    def is_relaxed(self) -> bool:
        return self.num_reqs is None

    def padded_to(self, num_reqs: int) -> BatchDescriptor:
        """The same kind of uniform batch with `num_reqs` rows.

        Raises:
            ConfigError: the batch is not uniform.
        """
        if self.query_len is None:
            raise ConfigError(f"{self} is not uniform: only its tokens can be padded")
        return replace(self, num_tokens=num_reqs * self.query_len, num_reqs=num_reqs)
