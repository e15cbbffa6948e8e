"""The arguments of a call, `generate` or `stream`, as one request after another."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from stepgraph.engine.errors import RequestError
from stepgraph.engine.params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]
Adapters = str | Sequence[str | None] | None

_WANTED = "prompts are text, token ids, or a list of either"
_NEITHER = (bytes, bytearray, memoryview, Mapping)  # though what they hold would pass for token ids or prompts


class Asked(NamedTuple):
    """What is asked for one prompt. adapter: a name. seed: the parameters', or one that was drawn."""

    prompt: Prompt
    params: SamplingParams
    adapter: str | None
    seed: int


def read_call(prompts: Prompt | Sequence[Prompt], params: Params | None, adapter: Adapters) -> list[Asked]:
    """One for each prompt. Raises RequestError: the arguments do not fit together."""
    listed = _as_list(prompts)
    shared = SamplingParams() if params is None else params
    each = list(shared) if isinstance(shared, Iterable) else [shared] * len(listed)
    if not all(isinstance(one, SamplingParams) for one in each):
        raise RequestError("sampling parameters are SamplingParams: one for all prompts, or a list with one for each")
    if len(each) != len(listed):
        raise RequestError(f"{len(each)} sampling parameters for {len(listed)} prompts; give one, or one for each")
    if adapter is not None and not isinstance(adapter, str | list | tuple):
        raise RequestError(f"adapters are names: one for all prompts, or a list with one for each, not {adapter!r:.80}")
    adapters = [adapter] * len(listed) if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(adapters) != len(listed):
        raise RequestError(f"{len(adapters)} adapters for {len(listed)} prompts; give one, or one for each")
    seeds = [secrets.randbits(63) if one.seed is None else one.seed for one in each]
    return [Asked(*one) for one in zip(listed, each, adapters, seeds, strict=True)]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed = list(prompts)
    except TypeError as error:  # a RequestError, which rank 0 tells the others: they wait for what it asks
        raise RequestError(_WANTED) from error
    ids = bool(listed) and all(is_token(item) for item in listed)
    if isinstance(prompts, _NEITHER) or not (ids or all(_is_prompt(item) for item in listed)):
        raise RequestError(_WANTED)
    return [listed] if ids else listed  # type: ignore[list-item, return-value]


def is_token(item: object) -> bool:
    """Whether it may stand for one, NumPy's numbers too."""
    return isinstance(item, Integral) and not isinstance(item, bool)


def _is_prompt(item: object) -> bool:
    return isinstance(item, str | Sequence) and not isinstance(item, _NEITHER)
