"""How a step is captured. Frozen, and the only switch there is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.ladder import Ladder


class Backend(StrEnum):
    """How a phase runs: one graph for the whole step, or eager."""

    FULL = "full"
    DISABLED = "disabled"


@dataclass(frozen=True)
class GraphConfig:
    """The decode phase's backend, its ladder, and how each size is captured.

    backend: `full` records the whole step as one graph; `disabled` runs it eagerly.
    ladder: captured sizes in requests. None only where the backend is `disabled`.
    warmups: eager runs before each recording, so that kernels are compiled and workspaces grown.
    debug: also check what is too dear to check always: an output read after its replay was overwritten raises.

    Raises:
        ConfigError: a `full` backend without a ladder, or fewer than one warm-up.
    """

    backend: Backend
    ladder: Ladder | None = None
    warmups: int = 1
    debug: bool = False

    def __post_init__(self) -> None:
        if self.backend is Backend.FULL and self.ladder is None:
            raise ConfigError("graphs: backend full needs a ladder, for example Ladder.vllm(256)")
        if self.warmups < 1:
            raise ConfigError(f"graphs: {self.warmups} warm-ups; a step must run once before it is recorded")

    @classmethod
    def preset(cls, mode: str, *, ladder: Ladder | None = None, warmups: int = 1, debug: bool = False) -> GraphConfig:
        """A configuration by vLLM's mode names: FULL (or FULL_DECODE_ONLY) and NONE.

        Raises:
            ConfigError: an unknown mode.
        """
        backends = {"FULL": Backend.FULL, "FULL_DECODE_ONLY": Backend.FULL, "NONE": Backend.DISABLED}
        if mode not in backends:
            raise ConfigError(f"graphs: unknown mode {mode!r}; known are {', '.join(backends)}")
        return cls(backends[mode], ladder, warmups, debug)
