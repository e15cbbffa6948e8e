"""How a step is captured. Frozen, and the only switch there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder

C = TypeVar("C", bound=StrEnum)


class Backend(StrEnum):
    """How a phase runs: one graph, graphs with eager breaks between them, or eager."""

    FULL = "full"
    BREAKABLE = "breakable"
    PIECEWISE = "piecewise"
    """As `breakable`, and what lies between two breaks is compiled; see `Compile`."""
    DISABLED = "disabled"


class Compile(StrEnum):
    """What compiles a step, in pieces between its breaks: a backend of torch's compiler, or nothing."""

    OFF = "off"
    INDUCTOR = "inductor"
    AOT_EAGER = "aot_eager"
    """Traces and changes nothing; for tests."""


class Debug(StrEnum):
    """What is checked beyond the cheap checks that are always on."""

    OFF = "off"
    CHECKS = "checks"
    """Every watched address before every replay, and outputs that are read after they were overwritten."""
    EAGER_THROUGH_GRAPH = "eager-through-graph"
    """As `checks`, and the whole step is one break: buffers, padding and dispatch as with graphs, kernels eager."""
    BREAK_EVERY_OP = "break-every-op"
    """As `checks`, and every operator is a break of its own."""


@dataclass(frozen=True)
class DecodePhase:
    """Uniform batches. ladder: captured sizes in requests. query_lens: tokens that each request may bring; every one
    has keys of its own, of size requests x query_len."""

    backend: Backend = Backend.DISABLED
    ladder: Ladder | None = None
    query_lens: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        _set(self, "backend", _chosen(Backend, self.backend, "decode: unknown backend"))
        _require_ladder("decode", self.backend, self.ladder)
        _set(self, "query_lens", _whole_numbers(self.query_lens, "decode: query lengths"))
        if not self.query_lens or min(self.query_lens) < 1 or len(set(self.query_lens)) < len(self.query_lens):
            raise ConfigError(f"decode: query lengths {self.query_lens} must be distinct and at least 1")


@dataclass(frozen=True)
class PrefillPhase:
    """All other batches, and uniform ones that have no key of their own.

    ladder: captured sizes in tokens.
    max_requests: request slots of a graph (fewer in one with fewer tokens); more requests run eagerly. None: as many
        as the buffers hold.
    pad_factor, pad_floor: the padding guard. A batch that would be padded to more than `pad_factor` times its tokens
        runs eagerly, unless the padded size is at most `pad_floor`: small ones are bound by their launches.
    """

    backend: Backend = Backend.DISABLED
    ladder: Ladder | None = None
    max_requests: int | None = None
    pad_factor: float = 2.0
    pad_floor: int = 64

    def __post_init__(self) -> None:
        _set(self, "backend", _chosen(Backend, self.backend, "prefill: unknown backend"))
        _require_ladder("prefill", self.backend, self.ladder)
        if self.max_requests is not None:
            _whole_numbers([self.max_requests], "prefill: max_requests")
            if self.max_requests < 1:
                raise ConfigError(f"prefill: {self.max_requests} request slots; a graph needs at least one")
        _whole_numbers([self.pad_floor], "prefill: pad_floor")
        if not isinstance(self.pad_factor, int | float) or not self.pad_factor >= 1 or self.pad_floor < 0:
            raise ConfigError(
                f"prefill: pad_factor {self.pad_factor} must be at least 1, and pad_floor {self.pad_floor} at least 0"
            )


@dataclass(frozen=True)
class GraphConfig:
    """What is captured, by phase, and how.

    lora_cases: numbers of active adapters that are captured; a live count takes the next one up.
    warmups: eager runs before each recording, so that kernels are compiled and workspaces grown. 0: one before the
        first of each kind, and before those that cannot be recorded without.
    compile: whether captured steps are compiled, in pieces between their breaks. With `full` the pieces share a graph,
        with `breakable` or `piecewise` each has its own; a phase that is disabled runs them without graphs.
    lazy: at first only the largest size of each kind is recorded, whose memory the others share; those follow when the
        runner's `capture_pending` is called, and until then their batches run eagerly.

    Raises:
        ConfigError: settings that contradict each other, or fewer warm-ups than none.
    """

    decode: DecodePhase = field(default_factory=DecodePhase)
    prefill: PrefillPhase = field(default_factory=PrefillPhase)
    lora_cases: tuple[int, ...] = (0,)
    warmups: int = 1
    debug: Debug = Debug.OFF
    lazy: bool = False
    compile: Compile = Compile.OFF

    def __post_init__(self) -> None:
        _whole_numbers([self.warmups], "graphs: warmups")
        if self.warmups < 0:
            raise ConfigError(f"graphs: {self.warmups} warm-ups; there cannot be fewer than none")
        _set(self, "lora_cases", _whole_numbers(self.lora_cases, "graphs: LoRA cases"))
        if not self.lora_cases or min(self.lora_cases) < 0 or list(self.lora_cases) != sorted(set(self.lora_cases)):
            raise ConfigError(f"graphs: LoRA cases {self.lora_cases} must ascend from 0 or more, each once")
        _set(self, "debug", _chosen(Debug, self.debug, "graphs: unknown debug"))
        _set(self, "compile", _chosen(Compile, self.compile, "graphs: unknown compiler"))

    @classmethod
    def preset(
        cls,
        mode: str,
        *,
        ladder: Ladder | None = None,
        prefill_ladder: Ladder | None = None,
        query_lens: tuple[int, ...] = (1,),
        warmups: int = 1,
        debug: Debug | str = Debug.OFF,
        lazy: bool = False,
        compile: Compile | str = Compile.OFF,
    ) -> GraphConfig:
        """A configuration by vLLM's mode names: NONE, FULL_DECODE_ONLY, FULL, PIECEWISE, FULL_AND_PIECEWISE.

        Its piecewise graphs are breakable ones where nothing is compiled.

        ladder: of decode, in requests. prefill_ladder: in tokens.

        Raises:
            ConfigError: an unknown mode, or a phase without its ladder.
        """
        compiler = _chosen(Compile, compile, "graphs: unknown compiler")
        full, disabled = Backend.FULL, Backend.DISABLED
        pieces = Backend.BREAKABLE if compiler is Compile.OFF else Backend.PIECEWISE
        modes = {
            "NONE": (disabled, disabled),
            "FULL_DECODE_ONLY": (full, disabled),
            "FULL": (full, full),
            "PIECEWISE": (pieces, pieces),
            "FULL_AND_PIECEWISE": (full, pieces),
        }
        if mode not in modes:
            raise ConfigError(f"graphs: unknown mode {mode!r}; known are {', '.join(modes)}")
        decode, prefill = modes[mode]
        return cls(
            DecodePhase(decode, ladder if decode is not disabled else None, query_lens),
            PrefillPhase(prefill, prefill_ladder if prefill is not disabled else None),
            warmups=warmups,
            debug=_chosen(Debug, debug, "graphs: unknown debug"),
            lazy=lazy,
            compile=compiler,
        )


def _set(config: object, name: str, value: object) -> None:
    """In a frozen configuration, what was given by another type."""
    object.__setattr__(config, name, value)


def _chosen(choices: type[C], value: str, unknown: str) -> C:
    try:
        return choices(value)
    except ValueError:
        raise ConfigError(f"{unknown} {value!r}; known are {', '.join(choices)}") from None


def _whole_numbers(values: Iterable[int], what: str) -> tuple[int, ...]:
    try:
        given = tuple(values)
    except TypeError:
        raise ConfigError(f"{what} {values!r}: give them as a tuple, such as (1,)") from None
    for value in given:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{what}: {value!r} is not a whole number")
    return given


def _require_ladder(phase: str, backend: Backend, ladder: Ladder | None) -> None:
    if ladder is not None and not isinstance(ladder, Ladder):
        raise ConfigError(
            f"{phase}: ladder {ladder!r} is not a Ladder; make one, for example Ladder.explicit([1, 2, 4])"
        )
    if backend is not Backend.DISABLED and ladder is None:
        raise ConfigError(f"{phase}: backend {backend} needs a ladder, for example Ladder.vllm(256)")
