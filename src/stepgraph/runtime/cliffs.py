"""What falls off a ladder, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.dispatch import Decision, Mode, Reason


def cliffs(coverage: Iterable[Decision]) -> list[str]:
    """Runs of neighbouring batches that fall off their ladder, each as a sentence that says what to change.

    coverage: of one kind of batch, ascending. A uniform batch falls off where it runs eagerly and where it takes the
    relaxed key although others of its kind have keys of their own.
    """
    decisions = list(coverage)
    own_keys = any(decision.key.is_uniform and decision.mode is not Mode.EAGER for decision in decisions)
    runs: list[list[Decision]] = []
    for decision in decisions:
        fell = decision.mode is Mode.EAGER or (own_keys and decision.reason is Reason.RELAXED)
        if not fell or decision.reason in (Reason.DISABLED, Reason.PENDING):
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and last.reason is decision.reason and _size(last.batch) + 1 == _size(decision.batch):
            runs[-1].append(decision)
        else:
            runs.append([decision])
    return [_sentence(run[0], run[-1]) for run in runs]


def _sentence(first: Decision, last: Decision) -> str:
    query_len = first.batch.query_len
    unit = "tokens" if query_len is None else "requests" if query_len == 1 else f"requests of {query_len} tokens"
    sizes = str(_size(first.batch)) if first is last else f"{_size(first.batch)} to {_size(last.batch)}"
    how = "run eagerly" if first.mode is Mode.EAGER else "take the relaxed key"
    return f"batches of {sizes} {unit} {how} ({first.reason}): {last.detail}"


def _size(batch: BatchDescriptor) -> int:
    return batch.num_reqs if batch.query_len is not None and batch.num_reqs is not None else batch.num_tokens
