"""The capture session: every key warmed up and recorded, in one pool, and no key brings the others down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.config import Debug
from stepgraph.runtime.dispatch import Mode
from stepgraph.runtime.errors import CaptureError
from stepgraph.runtime.platforms import Recording
from stepgraph.runtime.pool import GraphPool

T = TypeVar("T")

Progress = Callable[[int, int, str], None]
"""Called with (keys done, keys in all, what comes next); a front end draws it."""

CapturedStep = Callable[[BatchDescriptor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class CapturedGraph:
    """One recorded key, how it runs, and where its outputs lie."""

    key: BatchDescriptor
    mode: Mode
    recording: Recording
    outputs: dict[str, torch.Tensor]
    seconds: float


@dataclass(frozen=True)
class CaptureReport:
    """What a session captured, what it dropped and why, and how long it took in seconds."""

    graphs: dict[BatchDescriptor, CapturedGraph] = field(default_factory=dict)
    dropped: dict[BatchDescriptor, str] = field(default_factory=dict)
    seconds: float = 0.0


def capture_graphs(
    pool: GraphPool,
    keys: Mapping[BatchDescriptor, Mode],
    step: CapturedStep,
    *,
    warmups: int,
    debug: Debug = Debug.OFF,
    progress: Progress | None = None,
) -> CaptureReport:
    """Record `step` at each key, in the order given, so that smaller ones reuse what larger ones took from the pool.

    A key that fails is dropped with its reason and the others stay.

    Raises:
        CaptureError: not one key could be captured; says why, and for memory what to lower.
    """
    started = time.perf_counter()
    graphs: dict[BatchDescriptor, CapturedGraph] = {}
    dropped: dict[BatchDescriptor, str] = {}
    platform = pool.platform
    with _collector_frozen():
        for done, (key, mode) in enumerate(keys.items()):
            if progress is not None:
                progress(done, len(keys), describe(key))
            begun = time.perf_counter()
            try:
                for _ in range(warmups):
                    platform.warm_up(partial(step, key))
                recording, outputs = _record(pool, mode, debug, partial(step, key))
                graphs[key] = CapturedGraph(key, mode, recording, outputs, time.perf_counter() - begun)
            except (torch.OutOfMemoryError, CaptureError) as error:
                dropped[key] = _why(error, key, keys)
                pool.renew()
            except BaseException:
                pool.renew()
                raise
    if progress is not None:
        progress(len(keys), len(keys), "captured")
    if not graphs:
        key, why = list(dropped.items())[-1]
        raise CaptureError(f"not one size could be captured; {describe(key)}: {why}")
    platform.synchronize()
    return CaptureReport(graphs, dropped, time.perf_counter() - started)


def describe(key: BatchDescriptor) -> str:
    """A key in words: `512 tokens`, `16 requests`, `16 requests of 4 tokens`, and its adapters if any."""
    text = count(key.num_tokens, "token") if key.num_reqs is None else count(key.num_reqs, "request")
    if (key.query_len or 1) > 1:
        text += f" of {key.query_len} tokens"
    return f"{text} with {count(key.num_loras, 'adapter')}" if key.num_loras else text


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _record(pool: GraphPool, mode: Mode, debug: Debug, step: Callable[[], T]) -> tuple[Recording, T]:
    platform, handle = pool.platform, pool.handle
    if debug is Debug.EAGER_THROUGH_GRAPH:
        return platform.record_eager(step)
    if debug is Debug.BREAK_EVERY_OP:
        return platform.record_breakable(step, handle, every_op=True)
    return platform.record_breakable(step, handle) if mode is Mode.BREAKABLE else platform.record(step, handle)


def _why(error: Exception, key: BatchDescriptor, keys: Iterable[BatchDescriptor]) -> str:
    """Why a key was dropped, and for memory what to lower."""
    if not isinstance(error, torch.OutOfMemoryError):
        return str(error)
    phase, unit = ("decode", "request") if key.is_uniform else ("prefill", "token")
    family = [_size(k) for k in keys if (k.query_len, k.num_loras) == (key.query_len, key.num_loras)]
    smaller = [size for size in family if size < _size(key)]
    advice = f"end the {phase} ladder at {count(max(smaller), unit)}" if smaller else f"capture fewer {phase} sizes"
    return f"out of memory while capturing {describe(key)}; {advice}, or give the KV cache less memory (fewer blocks)"


def _size(key: BatchDescriptor) -> int:
    return key.num_tokens if key.num_reqs is None else key.num_reqs


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """No garbage collection while recording: it is slow there, and could free a graph in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()
