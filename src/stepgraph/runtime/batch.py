"""The key under which a step is captured and looked up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepgraph.runtime.errors import ConfigError


@dataclass(frozen=True)
class BatchDescriptor:
    """What a recorded step is specialised on.

    num_tokens: rows of token-shaped tensors.
    num_reqs: rows of request-shaped tensors; None where the graph does not depend on it.
    query_len: tokens a request brings (1 in plain decode). Where `num_reqs` is known the batch is uniform
        and num_tokens is num_reqs x query_len: the two units are never mixed.
    num_loras: active adapters.

    Raises:
        ConfigError: counts that contradict each other.
    """

    num_tokens: int
    num_reqs: int | None = None
    query_len: int = 1
    num_loras: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.query_len < 1 or self.num_loras < 0:
            raise ConfigError(f"{self}: counts must be positive")
        if self.num_reqs is not None and self.num_tokens != self.num_reqs * self.query_len:
            raise ConfigError(
                f"{self}: {self.num_tokens} tokens are not {self.num_reqs} requests x {self.query_len} tokens each"
            )

    @classmethod
    def decode(cls, num_reqs: int, query_len: int = 1, num_loras: int = 0) -> BatchDescriptor:
        """A uniform batch: every request brings `query_len` tokens."""
        return cls(num_reqs * query_len, num_reqs, query_len, num_loras)

    def padded_to(self, num_reqs: int) -> BatchDescriptor:
        """The same kind of uniform batch with `num_reqs` rows."""
        return replace(self, num_tokens=num_reqs * self.query_len, num_reqs=num_reqs)
