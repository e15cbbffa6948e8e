"""Reads the file of `stepgraph explain`. Every field is checked, and a wrong one is named with what it may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stepgraph.runtime.config import Backend, Compile, Debug, DecodePhase, GraphConfig, PrefillPhase
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import LARGEST, Ladder
from stepgraph.runtime.resolve import AttentionGroup
from stepgraph.runtime.support import AttentionCGSupport

LARGEST_FILE = 1 << 20
LONGEST_LIST = 16
"""Query lengths, LoRA cases and attention groups: each multiplies the work."""
MOST_GRAPHS = 100_000


@dataclass(frozen=True)
class Question:
    """What a file asks: a configuration, the model's attention, and what the buffers would hold."""

    config: GraphConfig
    groups: tuple[AttentionGroup, ...]
    max_requests: int
    max_tokens: int


def read_question(path: Path) -> Question:
    """The question in `path`; the format is shown by examples/explain.json.

    Raises:
        ConfigError: not JSON, too large, or a field that is unknown, of a wrong type, or cannot work; names it.
    """
    try:
        return _question(_Fields(_read(path), ""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    if len(raw) > LARGEST_FILE:
        raise ConfigError(f"larger than {LARGEST_FILE} bytes; a configuration is a few lines")
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {str(error)[:200]}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} is given twice in one object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class _Fields:
    """One object of the file. Each field is taken once; what is left at the end is unknown."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where or 'the file'} must be an object, {_got(value)}")
        self.where = where
        self._left: dict[str, Any] = dict(value)
        self._known: list[str] = []

    def name(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field

    def take(self, field: str) -> Any:
        """The value; None where it is null or absent."""
        self._known.append(field)
        return self._left.pop(field, None)

    def child(self, field: str) -> _Fields:
        """The object in a field; an empty one where it is null or absent."""
        value = self.take(field)
        return _Fields({} if value is None else value, self.name(field))

    def integer(self, field: str, default: int | None, *, low: int = 1, high: int = LARGEST) -> int:
        value = self.take(field)
        return _integer(default if value is None else value, self.name(field), low, high)

    def number(self, field: str, default: float) -> float:
        value = self.take(field)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value <= 1e6:
            raise ConfigError(f"{self.name(field)} must be a number above 0 and at most 1e6, {_got(value)}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.name(field)} must be true or false, {_got(value)}")
        return default if value is None else value

    def choice(self, field: str, among: Collection[str], default: str | None) -> str:
        value = self.take(field)
        value = default if value is None else value
        if not isinstance(value, str) or value not in among:
            raise ConfigError(f"{self.name(field)} must be one of {', '.join(among)}, {_got(value)}")
        return value

    def integers(self, field: str, default: tuple[int, ...], *, low: int) -> tuple[int, ...]:
        value = self.take(field)
        if value is None:
            return default
        return tuple(_integer(one, self.name(field), low, LARGEST) for one in _list(value, self.name(field)))

    def end(self) -> None:
        if self._left:
            unknown = ", ".join(self.name(field)[:80] for field in list(self._left)[:5])
            raise ConfigError(f"unknown: {unknown}; known here are {', '.join(self._known)}")


def _question(fields: _Fields) -> Question:
    max_requests = fields.integer("max_requests", None)
    max_tokens = fields.integer("max_tokens", None)
    decode = _decode(fields.child("decode"), max_requests)
    prefill = _prefill(fields.child("prefill"), max_tokens)
    cases = fields.integers("lora_cases", (0,), low=0)
    warmups = fields.integer("warmups", 1)
    debug = Debug(fields.choice("debug", tuple(Debug), Debug.OFF))
    compile = Compile(fields.choice("compile", tuple(Compile), Compile.OFF))
    value = fields.take("attention")
    groups = [] if value is None else _list(value, "attention")
    attention = tuple(_attention(_Fields(group, f"attention[{i}]")) for i, group in enumerate(groups))
    fields.end()
    config = GraphConfig(decode, prefill, cases, warmups, debug, compile=compile)
    graphs = (len(decode.ladder or ()) * len(decode.query_lens) + len(prefill.ladder or ())) * len(cases)
    if graphs > MOST_GRAPHS:
        raise ConfigError(f"{graphs} graphs; at most {MOST_GRAPHS} are explained, and far fewer fit a GPU")
    return Question(config, attention, max_requests, max_tokens)


def _decode(fields: _Fields, max_requests: int) -> DecodePhase:
    backend = Backend(fields.choice("backend", tuple(Backend), Backend.DISABLED))
    query_lens = fields.integers("query_lens", (1,), low=1)
    ladder, in_tokens = _ladder(fields, "vllm", max_requests)
    fields.end()
    if in_tokens:
        if len(query_lens) != 1:
            raise ConfigError("decode.ladder.unit: a ladder in tokens is for one query length; give sizes in requests")
        try:
            ladder = ladder.in_requests(query_lens[0])
        except ConfigError as error:
            raise ConfigError(f"decode.ladder: {error}") from None
    return DecodePhase(backend, ladder, query_lens)


def _prefill(fields: _Fields, max_tokens: int) -> PrefillPhase:
    backend = Backend(fields.choice("backend", tuple(Backend), Backend.DISABLED))
    ladder, _ = _ladder(fields, "sglang-prefill", max_tokens)
    slots = fields.take("max_requests")
    slots = None if slots is None else _integer(slots, "prefill.max_requests", 1, LARGEST)
    pad_factor = fields.number("pad_factor", PrefillPhase.pad_factor)
    pad_floor = fields.integer("pad_floor", PrefillPhase.pad_floor, low=0)
    fields.end()
    return PrefillPhase(backend, ladder, slots, pad_factor, pad_floor)


_RULES: Mapping[str, Callable[[int, bool], Ladder]] = {
    "vllm": lambda size, append: Ladder.vllm(size, append_max=append),
    "vllm-interactivity": lambda size, append: Ladder.vllm(size, interactivity=True, append_max=append),
    "sglang": lambda size, append: Ladder.sglang(size),
    "sglang-speculative": lambda size, append: Ladder.sglang(size, speculative=True),
    "sglang-prefill": lambda size, append: Ladder.sglang_prefill(size, append_max=append),
}


def _ladder(phase: _Fields, rule: str, max_size: int) -> tuple[Ladder, bool]:
    """A list of sizes, or a rule with its maximum; and whether it is in tokens although the phase counts requests."""
    value, where = phase.take("ladder"), phase.name("ladder")
    if isinstance(value, list):
        return _sizes(value, where), False
    fields = _Fields({} if value is None else value, where)
    unit = "requests" if phase.where == "decode" else "tokens"
    in_tokens = fields.choice("unit", ("requests", "tokens") if unit == "requests" else ("tokens",), unit) != unit
    sizes = fields.take("sizes")
    if sizes is not None:
        fields.end()
        return _sizes(sizes, f"{where}.sizes"), in_tokens
    rule = fields.choice("rule", tuple(_RULES), rule)
    size, append = fields.integer("max", max_size), fields.flag("append_max", True)
    fields.end()
    if not append and rule in ("sglang", "sglang-speculative"):
        raise ConfigError(f"{where}.append_max: the rule {rule} always holds its maximum; leave append_max out")
    try:
        return _RULES[rule](size, append), in_tokens
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _sizes(value: object, where: str) -> Ladder:
    sizes = [_integer(size, where, 1, LARGEST) for size in _list(value, where, LARGEST)]
    try:
        return Ladder.explicit(sizes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _attention(fields: _Fields) -> AttentionGroup:
    name = fields.take("name")
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= 80:
        raise ConfigError(f"{fields.name('name')} must be a name of 1 to 80 characters, {_got(name)}")
    support = AttentionCGSupport[fields.choice("support", tuple(AttentionCGSupport.__members__), None)]
    bound = fields.take("max_query_len")
    bound = None if bound is None else _integer(bound, fields.name("max_query_len"), 1, LARGEST)
    fields.end()
    return AttentionGroup(name, support, bound)


def _integer(value: object, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{where} must be a whole number from {low} to {high}, {_got(value)}")
    return value


def _list(value: object, where: str, most: int = LONGEST_LIST) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        got = f"it has {len(value)}" if isinstance(value, list) else _got(value)
        raise ConfigError(f"{where} must be a list of at most {most}, {got}")
    return value


def _got(value: object) -> str:
    return "it is absent" if value is None else f"got {json.dumps(value)[:80]}"
