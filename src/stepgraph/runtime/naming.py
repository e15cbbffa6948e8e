"""Keys and counts in words."""

from __future__ import annotations

from stepgraph.runtime.batch import BatchDescriptor


def describe(key: BatchDescriptor) -> str:
    """A key in words: `512 tokens`, `16 requests`, `16 requests of 4 tokens`, and its adapters if any."""
    text = count(key.num_tokens, "token") if key.num_reqs is None else count(key.num_reqs, "request")
    if (key.query_len or 1) > 1:
        text += f" of {key.query_len} tokens"
    return f"{text} with {count(key.num_loras, 'adapter')}" if key.num_loras else text


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def size_of(key: BatchDescriptor) -> int:
    """Its size in its ladder: requests, or tokens of a relaxed key."""
    return key.num_tokens if key.num_reqs is None else key.num_reqs
