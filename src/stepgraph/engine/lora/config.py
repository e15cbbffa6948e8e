"""How many adapters there may be, how large, and for how many at a time steps are captured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepgraph.runtime.config import GraphConfig
from stepgraph.runtime.errors import ConfigError

_LEAST_RANK = 16  # of a slot: what tensor cores multiply at the least
_MOST_RANK = 128  # what the kernels' tiles have room for


@dataclass(frozen=True)
class LoraConfig:
    """Room for adapters, fixed when the engine starts.

    slots: adapters loaded at a time. max_rank: the highest rank of one; slots have the next power of two, at least 16.
    cases: numbers of active adapters that graphs are captured for; a batch takes the next one up, and runs eagerly
        above the last. By default 0, powers of two, and `slots`.

    Raises:
        ConfigError: no slots, a rank that is not 1 to 128, or cases that do not ascend, name no adapter at all, or more
            than `slots`.
    """

    slots: int = 4
    max_rank: int = 16
    cases: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in (("slots", 4096), ("max_rank", _MOST_RANK)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"lora: {name} is {value!r}; it is a whole number from 1 to {most}")
        if not self.cases:
            powers = [1 << power for power in range(self.slots.bit_length()) if 1 << power < self.slots]
            object.__setattr__(self, "cases", (0, *powers, self.slots))
        self.require_cases(GraphConfig(lora_cases=self.cases).lora_cases)

    @property
    def rank(self) -> int:
        """Of a slot."""
        return max(_LEAST_RANK, 1 << (self.max_rank - 1).bit_length())

    def require_cases(self, cases: tuple[int, ...]) -> None:
        """Refuse cases that no batch could use, or without which adapters would not be applied.

        Raises:
            ConfigError: says what they may be.
        """
        if not 1 <= cases[-1] <= self.slots:
            raise ConfigError(f"lora: cases {cases} must end at 1 to {self.slots}, the number of slots")


def with_cases(graphs: GraphConfig, lora: LoraConfig | None) -> GraphConfig:
    """The graphs with the cases of `lora`, unless they have cases of their own."""
    if lora is None or graphs.lora_cases != (0,):
        return graphs
    return replace(graphs, lora_cases=lora.cases)
