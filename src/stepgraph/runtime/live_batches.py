"""From the arguments of a call to the batch that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.buffers import StaticBuffers
from stepgraph.runtime.errors import ConfigError, InputError

ARGUMENTS = ("num_requests", "query_len", "num_tokens", "num_loras")
_INT_OR_NONE = (int, type(None))


class LiveBatches:
    """Batches that the buffers hold. Plain decode is looked up, the others are made when they come.

    Raises:
        ConfigError: a slot that is called like an argument of a call.
    """

    def __init__(self, buffers: StaticBuffers) -> None:
        if taken := buffers.slots.keys() & set(ARGUMENTS):
            raise ConfigError(f"slot {min(taken)}: a call of the runner has an argument of this name; use another")
        self._buffers = buffers
        self._decode = [BatchDescriptor.decode(max(n, 1)) for n in range(buffers.max_requests + 1)]

    def get(
        self, num_requests: int, query_len: int = 1, num_tokens: int | None = None, num_loras: int = 0
    ) -> BatchDescriptor:
        """The batch; what the arguments mean is said in GraphRunner.__call__.

        Raises:
            InputError: no whole numbers, more requests or tokens than the buffers hold, or arguments that contradict
                each other.
        """
        # Asked in this way, a step's usual arguments take 0.1 µs.
        if not (type(num_requests) is type(query_len) is type(num_loras) is int and type(num_tokens) in _INT_OR_NONE):
            num_requests, query_len, num_loras = map(_whole, (num_requests, query_len, num_loras))
            num_tokens = None if num_tokens is None else _whole(num_tokens)
        buffers = self._buffers
        if not 1 <= num_requests <= buffers.max_requests:
            raise InputError(f"{num_requests} requests; the buffers hold 1 to {buffers.max_requests}")
        if num_tokens is None and query_len == 1 and num_loras == 0:
            return self._decode[num_requests]
        if num_loras < 0:
            raise InputError(f"{num_loras} adapters; there are 0 or more")
        tokens = num_requests * query_len if num_tokens is None else num_tokens
        if not num_requests <= tokens <= buffers.max_tokens:
            raise InputError(
                f"{tokens} tokens of {num_requests} requests; each has at least one, and the buffers hold "
                f"{buffers.max_tokens}"
            )
        if num_tokens is None:
            return BatchDescriptor.decode(num_requests, query_len, num_loras)
        if query_len != 1:
            raise InputError(f"query_len={query_len} and num_tokens={num_tokens}: a batch is uniform or it is not")
        return BatchDescriptor.mixed(num_tokens, num_requests, num_loras)

    def infer_requests(self, inputs: Mapping[str, Any]) -> int:
        """How many requests the first request slot among the inputs has rows for.

        Raises:
            InputError: there is none, or it is one value.
        """
        for name, value in inputs.items():
            slot = self._buffers.slots.get(name)
            if slot is not None and slot.per == "request":
                if not hasattr(value, "__len__") or not getattr(value, "shape", (1,)):
                    raise InputError(f"slot {name}: one value is no batch; give a row for each request")
                return len(value)
        raise InputError("no request slot among the inputs tells the batch size; pass num_requests=")


def _whole(value: Any) -> int:
    """Also of numpy's integers.

    Raises:
        InputError: no whole number.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise InputError(f"{value!r} is not a whole number; a batch has whole numbers of requests, tokens and adapters")
