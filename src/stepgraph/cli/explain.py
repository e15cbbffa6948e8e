"""`stepgraph explain`: what a configuration will do, batch by batch, without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from stepgraph.cli.explain_config import Question, read_question
from stepgraph.runtime.batch import BatchDescriptor
from stepgraph.runtime.cliffs import cliffs
from stepgraph.runtime.config import Backend, GraphConfig
from stepgraph.runtime.dispatch import Decision, Dispatcher, Mode, Reason
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.keys import capture_keys
from stepgraph.runtime.resolve import Resolution, resolve


def explain(path: Path, *, as_json: bool, strict: bool, picture: Path | None) -> None:
    """Print what the configuration in `path` resolves to and the route of every batch.

    Raises:
        ConfigError: a configuration that is wrong or cannot work, with `strict` one that would be downgraded, or a
            picture that cannot be drawn or written.
    """
    question = read_question(path)
    try:
        resolution = _resolve(question, question.config, strict=strict)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    kinds = coverages(question, resolution.config)
    if picture is not None:
        from stepgraph.cli.explain_view import draw

        draw(picture, kinds)
    report = make_report(question, resolution, kinds)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        from stepgraph.cli.explain_view import print_report

        print_report(report)


def coverages(question: Question, resolved: GraphConfig) -> dict[str, list[Decision]]:
    """By kind of batch the route of every size that a step can hold: uniform ones by query length, then mixed ones."""
    rows, tokens = question.max_requests, question.max_tokens
    dispatcher = Dispatcher(resolved, rows, capture_keys(resolved, max_requests=rows, max_tokens=tokens))
    kinds = {
        f"uniform, {_tokens(query_len)} a request": dispatcher.coverage(min(rows, tokens // query_len), query_len)
        for query_len in question.config.decode.query_lens
    }
    kinds["mixed"] = dispatcher.coverage_mixed(tokens)
    return kinds


def make_report(question: Question, resolution: Resolution, kinds: dict[str, list[Decision]]) -> dict[str, Any]:
    """What --json prints, and the tables show."""
    config = resolution.config
    graphs = capture_keys(config, max_requests=question.max_requests, max_tokens=question.max_tokens)
    return {
        "max_requests": question.max_requests,
        "max_tokens": question.max_tokens,
        "attention": [{**asdict(group), "support": group.support.name} for group in question.groups],
        "changes": [asdict(change) for change in resolution.changes],
        "backends": backend_table(question),
        "graphs": Counter(mode.value for mode in graphs.values()),
        "batches": [_kind(name, coverage) for name, coverage in kinds.items()],
        "advice": _advice(question, config, kinds),
    }


def backend_table(question: Question) -> list[dict[str, Any]]:
    """Phase x backend: what each phase would get of each backend, with the rule where that is less."""
    config, table = question.config, []
    for query_len in config.decode.query_lens:
        cells = {}
        for backend in Backend:
            decode = replace(config.decode, backend=backend, query_lens=(query_len,))
            cells[backend.value] = _cell(question, replace(config, decode=decode), "decode")
        phase = f"decode, {_tokens(query_len)} a request"
        table.append({"phase": phase, "asked": config.decode.backend.value, "gets": cells})
    cells = {
        backend.value: _cell(question, replace(config, prefill=replace(config.prefill, backend=backend)), "prefill")
        for backend in Backend
    }
    table.append({"phase": "prefill and mixed", "asked": config.prefill.backend.value, "gets": cells})
    return table


def _cell(question: Question, config: GraphConfig, phase: str) -> str:
    """What `phase` resolves to, with the other one disabled so that its faults are not taken for this one's."""
    if phase == "decode":
        config = replace(config, prefill=replace(config.prefill, backend=Backend.DISABLED))
    else:
        config = replace(config, decode=replace(config.decode, backend=Backend.DISABLED))
    try:
        resolution = _resolve(question, config)
    except ConfigError:
        return "refused"
    resolved: Backend = getattr(resolution.config, phase).backend
    asked: Backend = getattr(config, phase).backend
    if resolved is asked:
        return resolved.value
    return f"{resolved} ({next(c.rule for c in resolution.changes if c.where.startswith(phase))})"


def _resolve(question: Question, config: GraphConfig, *, strict: bool = False) -> Resolution:
    return resolve(
        config,
        question.groups,
        max_requests=question.max_requests,
        max_tokens=question.max_tokens,
        strict=strict,
    )


def _kind(name: str, coverage: Sequence[Decision]) -> dict[str, Any]:
    worst = _worst(coverage)
    return {
        "kind": name,
        "unit": "tokens" if coverage and coverage[0].batch.query_len is None else "requests",
        "batches": len(coverage),
        "missed": sum(decision.reason not in (Reason.EXACT, Reason.PADDED) for decision in coverage),
        "modes": Counter(decision.mode.value for decision in coverage),
        "reasons": Counter(decision.reason.value for decision in coverage),
        "worst_padding": None
        if worst is None
        else {"real": worst.real, "padded": worst.padded, "unit": _unit(worst.key), "share": _share(worst)},
        "cliffs": cliffs(coverage),
        "ranges": ranges(coverage),
    }


def ranges(coverage: Sequence[Decision]) -> list[dict[str, Any]]:
    """Neighbouring batches of one route: the same graph, or eager for the same reason."""
    found = []
    for (mode, key, reason), group in groupby(coverage, _route):
        run = list(group)
        first, last = _size(run[0].batch), _size(run[-1].batch)
        rung = None if key is None else _size(key)
        unit = None if key is None else _unit(key)
        detail = run[-1].detail if mode is Mode.EAGER or reason is Reason.RELAXED else ""
        route = {"mode": mode.value, "rung": rung, "rung_unit": unit, "reason": reason.value, "detail": detail}
        found.append({"first": first, "last": last, **route})
    return found


def _route(decision: Decision) -> tuple[Mode, BatchDescriptor | None, Reason]:
    """What one range has in common; that the last of it fits its rung exactly makes no route of its own."""
    key = None if decision.mode is Mode.EAGER else decision.key
    return decision.mode, key, Reason.PADDED if decision.reason is Reason.EXACT else decision.reason


def _worst(coverage: Sequence[Decision]) -> Decision | None:
    return max((d for d in coverage if d.padded > d.real), key=_share, default=None)


def _share(decision: Decision) -> float:
    """Padded rows of all rows."""
    return (decision.padded - decision.real) / decision.padded


def _advice(question: Question, config: GraphConfig, kinds: dict[str, list[Decision]]) -> list[str]:
    """What to change, the losses first."""
    advice = [cliff for coverage in kinds.values() for cliff in cliffs(coverage)]
    slots = config.prefill.max_requests
    if config.prefill.backend is not Backend.DISABLED and slots is not None and slots < question.max_requests:
        advice.append(
            f"mixed batches of more than {slots} requests run eagerly (too_many_requests): "
            f"raise prefill.max_requests to {question.max_requests}"
        )
    for name, coverage in kinds.items():
        worst = _worst(coverage)
        if worst is not None and _share(worst) > 0.25:
            unit = _unit(worst.key)
            advice.append(
                f"{name}: {worst.real} → {worst.padded} {unit} is {_share(worst):.1%} padding; "
                f"capture {worst.real} too if such batches are frequent"
            )
    return advice


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _unit(key: BatchDescriptor) -> str:
    return "tokens" if key.query_len is None else "requests"


def _size(batch: BatchDescriptor) -> int:
    return batch.num_tokens if batch.query_len is None or batch.num_reqs is None else batch.num_reqs
