"""From the configuration that was asked for to the one that can work, with every change on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stepgraph.runtime.changes import Change as Change
from stepgraph.runtime.changes import Severity as Severity
from stepgraph.runtime.compile_rules import debug_compiles_nothing, pieces
from stepgraph.runtime.config import Backend, Debug, DecodePhase, GraphConfig
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder
from stepgraph.runtime.support import AttentionCGSupport


@dataclass(frozen=True)
class AttentionGroup:
    """Layers that share an attention backend. name: of the backend. max_query_len: the most new tokens of a request
    that its recordings replay right; None: any number.

    Raises:
        ConfigError: a bound below 1.
    """

    name: str
    support: AttentionCGSupport
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_query_len is not None and self.max_query_len < 1:
            raise ConfigError(f"attention {self.name}: max_query_len {self.max_query_len} must be at least 1")


@dataclass(frozen=True)
class Resolution:
    """The configuration that works, and what had to change for it, in the order of the rules."""

    config: GraphConfig
    changes: tuple[Change, ...]


def resolve(
    config: GraphConfig,
    groups: Sequence[AttentionGroup],
    *,
    max_requests: int,
    max_tokens: int,
    strict: bool = False,
) -> Resolution:
    """Apply every rule to `config`.

    groups: the model's attention; of their levels and bounds the lowest counts. None at all: nothing limits a capture.
    max_requests, max_tokens: what the buffers hold, and so the largest step. strict: refuse where a rule would take
    a lesser mode than asked for.

    Raises:
        ConfigError: a setting that cannot work, or with `strict` a downgrade. Names all of them.
    """
    if max_requests < 1 or max_tokens < max_requests:
        raise ConfigError(
            f"limits: {max_requests} requests and {max_tokens} tokens; a step has at least one request, "
            f"and a token for each"
        )
    facts = _Facts(tuple(groups), max_requests, max_tokens)
    changes: list[Change] = []
    for rule in RULES:
        config, changed = rule(config, facts)
        changes += changed
    refused = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
    faults = [str(change) for change in changes if change.severity in refused]
    if faults:
        raise ConfigError("graphs: " + "; ".join(faults))
    return Resolution(config, tuple(changes))


@dataclass(frozen=True)
class _Facts:
    groups: tuple[AttentionGroup, ...]
    max_requests: int
    max_tokens: int

    @property
    def weakest(self) -> AttentionGroup:
        return min(self.groups, key=lambda group: group.support, default=_ANYTHING)

    @property
    def shortest(self) -> AttentionGroup:
        """The group with the lowest bound of query lengths."""
        bounded = [group for group in self.groups if group.max_query_len is not None]
        return min(bounded, key=lambda group: group.max_query_len or 0, default=_ANYTHING)


_ANYTHING = AttentionGroup("none", AttentionCGSupport.ALWAYS)

Rule = Callable[[GraphConfig, _Facts], tuple[GraphConfig, list[Change]]]


def _debug_breaks(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    """With everything in a break there is no full graph, and attention may be of any level."""
    if config.debug not in (Debug.EAGER_THROUGH_GRAPH, Debug.BREAK_EVERY_OP):
        return config, []
    reason = f"debug={config.debug} runs every kernel in a break"
    changes = [
        Change(f"{phase}.backend", "full", Backend.BREAKABLE, "debug-breaks", reason, Severity.INFO)
        for phase in _full_phases(config)
    ]
    decode, prefill = config.decode, config.prefill
    if decode.backend is Backend.FULL:
        decode = replace(decode, backend=Backend.BREAKABLE)
    if prefill.backend is Backend.FULL:
        prefill = replace(prefill, backend=Backend.BREAKABLE)
    return replace(config, decode=decode, prefill=prefill), changes


def _full_needs_support(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    group = facts.weakest
    if group.support > AttentionCGSupport.NEVER:
        return config, []
    reason = f"attention backend {group.name} ({group.support.name}) cannot be recorded; ask for breakable or disabled"
    return config, [
        Change(f"{phase}.backend", "full", "none", "full-needs-support", reason, Severity.ERROR)
        for phase in _full_phases(config)
    ]


def _full_prefill(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    """A full graph of a mixed batch holds attention for any mix of query lengths."""
    weakest, shortest = facts.weakest, facts.shortest
    if config.prefill.backend is not Backend.FULL or weakest.support is AttentionCGSupport.NEVER:
        return config, []
    if weakest.support < AttentionCGSupport.ALWAYS:
        rule, reason = "full-prefill-needs-always", f"{weakest.name} ({weakest.support.name}) replays no mixed batch"
    elif shortest.max_query_len is not None and shortest.max_query_len < facts.max_tokens:
        rule, reason = (
            "full-prefill-query-bound",
            (
                f"{shortest.name} replays at most {shortest.max_query_len} tokens a request, "
                f"and a prompt may bring {facts.max_tokens}"
            ),
        )
    else:
        return config, []
    said = f"attention backend {reason}; mixed batches take BREAKABLE, with attention in the breaks"
    change = Change("prefill.backend", "full", Backend.BREAKABLE, rule, said, Severity.WARNING)
    return replace(config, prefill=replace(config.prefill, backend=Backend.BREAKABLE)), [change]


def _query_lengths(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    """Query lengths that cannot have keys of their own lose them; with the last one the phase is disabled."""
    decode = config.decode
    if decode.backend is Backend.DISABLED:
        return config, []
    prefill = config.prefill.backend
    instead = "run eagerly" if prefill is Backend.DISABLED else f"take the relaxed key of their tokens ({prefill.name})"
    left, changes = [], []
    for query_len in decode.query_lens:
        rule, reason = _against(decode, query_len, facts)
        if not rule:
            left.append(query_len)
            continue
        where, said = f"decode.query_lens[{query_len}]", f"{reason}; its batches {instead}"
        changes.append(Change(where, decode.backend, "no keys", rule, said, Severity.WARNING))
    if not changes:
        return config, []
    kept = replace(decode, query_lens=tuple(left)) if left else DecodePhase(query_lens=decode.query_lens)
    return replace(config, decode=kept), changes


def _against(decode: DecodePhase, query_len: int, facts: _Facts) -> tuple[str, str]:
    """The rule that denies a query length keys of its own, and why; empty where none does."""
    if query_len > facts.max_tokens:
        return "query-length-fits-step", f"a step holds {facts.max_tokens} tokens"
    if decode.backend is not Backend.FULL:
        return "", ""
    weakest, shortest = facts.weakest, facts.shortest
    if query_len > 1 and weakest.support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE:
        return (
            "query-length-needs-uniform-batch",
            f"attention backend {weakest.name} ({weakest.support.name}) replays one token a request",
        )
    if shortest.max_query_len is not None and query_len > shortest.max_query_len:
        reason = f"attention backend {shortest.name} replays at most {shortest.max_query_len} tokens a request"
        return "query-length-bound", reason
    return "", ""


def _ladders_fit(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    decode, prefill, changes = config.decode, config.prefill, []
    if decode.ladder is not None and decode.backend is not Backend.DISABLED:
        for query_len in decode.query_lens:  # which capture_keys() cuts once more, each to its own
            limit = min(facts.max_requests, facts.max_tokens // query_len)
            where = "decode.ladder" if query_len == 1 else f"decode.ladder[query length {query_len}]"
            changes += _cut(decode.ladder, limit, where, f"the buffers hold {limit} requests of {query_len} tokens")
        config = replace(config, decode=replace(decode, ladder=decode.ladder.upto(facts.max_requests)))
    if prefill.ladder is not None and prefill.backend is not Backend.DISABLED:
        limit = facts.max_tokens
        changes += _cut(prefill.ladder, limit, "prefill.ladder", f"the buffers hold {limit} tokens")
        config = replace(config, prefill=replace(prefill, ladder=prefill.ladder.upto(limit)))
    return config, changes


def _slots_fit(config: GraphConfig, facts: _Facts) -> tuple[GraphConfig, list[Change]]:
    slots, rows = config.prefill.max_requests, facts.max_requests
    if slots is None or slots <= rows:
        return config, []
    reason = f"the buffers hold {rows} requests"
    change = Change("prefill.max_requests", str(slots), str(rows), "slots-fit-buffers", reason, Severity.INFO)
    return replace(config, prefill=replace(config.prefill, max_requests=rows)), [change]


RULES: tuple[Rule, ...] = (
    debug_compiles_nothing,
    _debug_breaks,
    _full_needs_support,
    _full_prefill,
    pieces,
    _query_lengths,
    _ladders_fit,
    _slots_fit,
)


def _full_phases(config: GraphConfig) -> list[str]:
    phases = {"decode": config.decode.backend, "prefill": config.prefill.backend}
    return [phase for phase, backend in phases.items() if backend is Backend.FULL]


def _cut(ladder: Ladder, limit: int, where: str, reason: str) -> list[Change]:
    if ladder.max_size <= limit:
        return []
    sizes = (f"up to {ladder.max_size}", f"up to {limit}")
    return [Change(where, *sizes, "ladder-fits-buffers", reason, Severity.INFO)]
